"""The state of a model and its optimizer as one flat mapping, by names that do not depend on how either is wrapped or sharded.

torch's part of it is imported where it is called: it takes as long as the rest of torch, and a driver needs none of it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from undula.state.pieces import Table

MODEL = "model."
OPTIMIZER = "optimizer."


def model_and_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """{"model.<parameter>": tensor, "optimizer.state.<parameter>.<name>": tensor, "optimizer.param_groups...": value}."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = {MODEL + name: value for name, value in get_model_state_dict(model).items()}
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=flat)
    return state | {OPTIMIZER + name: value for name, value in optimizer_state.items()}


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The reverse of `model_and_optimizer_state`."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    set_model_state_dict(model, _below(MODEL, state))
    set_optimizer_state_dict(model, optimizer, _below(OPTIMIZER, state), options=flat)


def beside_model_and_optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a state has beside what these two make of it."""
    return {name: value for name, value in state.items() if not name.startswith((MODEL, OPTIMIZER))}


def empty_like_saved(model: nn.Module, optimizer: torch.optim.Optimizer, table: Table) -> dict[str, Tensor]:
    """Tensors for a saved state to be restored into."""
    state = model_and_optimizer_state(model, optimizer)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _below(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
