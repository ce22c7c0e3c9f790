"""Updates of the optimizer that are recorded before their step is committed, and taken again where a rank was lost with its state.

A rank of a sharded model has a part of the state that no other rank has. What an update needs beside this part is recorded before the
commit: the rank's shard of the reduced and clipped gradient, the settings of the optimizer, and what LARS and LAMB have computed over all
ranks. From these and an older state, the optimizer computes the same bits again, on plain tensors.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from undula.state.model_state import MODEL
from undula.state.optimizer_state import ENTRIES, GROUPS, STATE, optimizer_state
from undula.state.pieces import Holding, Piece, RankState, piece_of
from undula.state.values import decode

GRADIENT, TRUST = "update.gradient.", "update.trust."
"""Beginnings of the names of a recorded update's tensors: the gradient of each parameter, and the ratios of LARS and LAMB."""
BEFORE, APPLIES, KIND, PRESENT = "update.before", "update.applies", "update.kind", "update.present"
"""Values of a recorded update: the number of steps before it, whether the step is not skipped, the class of the optimizer, and the names of
the parameters that have a gradient."""
OTHERS = "update.others"
"""Value of a recorded update: the names of the parameters that the optimizer does not have, and that no update changes."""


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer, as recorded updates name it."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def can_replay(values: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a recorded update, of which the values are given, is one of such an optimizer."""
    return bool(values[KIND] == kind_of(optimizer))


def replayed_holding(holding: Holding | None, values: Mapping[str, Any]) -> Holding | None:
    """Return the extent of what `replayed` returns, given that of the state before and the values of the update; None for none."""
    if holding is None:
        return None
    known = _known_after(values)
    boxes = {name: box for name, box in holding.boxes.items() if _is_kept(name, known)}
    return Holding(holding.expected, boxes)


def replayed(state: RankState, update: RankState, kind: type[torch.optim.Optimizer], device: torch.device) -> RankState:
    """Return the state of a rank after an update, without the pieces that an update does not make, such as buffers.

    Args:
        state: State of the rank before the update, which is not changed.
        update: The recorded update.
        kind: Class of the optimizer.
        device: Device on which the update is computed.
    """
    names, known = _parameters_of(update.values), _known_after(update.values)
    kept = {name: piece for name, piece in state.pieces.items() if _is_kept(name, known)}
    if not update.values[APPLIES]:
        return RankState(kept, state.values)
    parameters = {name: nn.Parameter(kept[MODEL + name].tensor.to(device, copy=True), False) for name in names}
    for name in update.values[PRESENT]:
        parameters[name].grad = update.pieces[GRADIENT + name].tensor.to(device, copy=True)  # which SGD may change
    settings = {name: piece.tensor for name, piece in update.pieces.items()}
    make: Any = kind
    optimizer: torch.optim.Optimizer = make(
        [
            {
                "params": [parameters[name] for name in group["parameters"]],
                **{key: decode(value, settings, device) for key, value in group["settings"].items()},
            }
            for group in update.values[GROUPS]
        ]
    )
    _load_entries(optimizer, parameters, state, device)
    ratios = [piece.tensor.to(device) for name, piece in sorted(update.pieces.items()) if name.startswith(TRUST)]
    if ratios:
        make = optimizer
        make.settled = ratios
    optimizer.step()
    return _state_of(optimizer, parameters, state, kept)


def _load_entries(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: RankState, device: torch.device
) -> None:
    tensors = {name: piece.tensor.clone() for name, piece in state.pieces.items() if name.startswith(f"{STATE}.")}
    for name, entries in state.values[ENTRIES].items():
        if name in parameters:
            optimizer.state[parameters[name]] = decode(entries, tensors, device)


def _state_of(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    before: RankState,
    kept: Mapping[str, Piece],
) -> RankState:
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    described = optimizer_state(optimizer, names)
    found = {MODEL + name: parameter.detach() for name, parameter in parameters.items()}
    found |= {name: value for name, value in described.items() if isinstance(value, Tensor)}
    pieces = {name: replace(piece, tensor=found.get(name, piece.tensor)) for name, piece in kept.items()}
    # What the optimizer has made in this update, which the next one needs, is no part of what this rank offers.
    pieces |= {name: piece_of(tensor) for name, tensor in found.items() if name not in kept}
    return RankState(pieces, {**before.values, ENTRIES: described[ENTRIES], GROUPS: described[GROUPS]})


def _parameters_of(values: Mapping[str, Any]) -> dict[str, None]:
    """Return the names of the optimizer's parameters, in its order."""
    return {name: None for group in values[GROUPS] for name in group["parameters"]}


def _known_after(values: Mapping[str, Any]) -> set[str]:
    """Return the names of the pieces of the model that are known after an update, given the values of the update."""
    return {MODEL + name for name in (*_parameters_of(values), *values[OTHERS])}


def _is_kept(name: str, known: Collection[str]) -> bool:
    return name.startswith(f"{STATE}.") or name in known
