"""Files that a script writes with an Accelerator."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor


def weights_of(model: nn.Module) -> dict[str, Any]:
    """Return the weights of a model. Those of a sharded model are put together in the memory of rank 0; all ranks call this."""
    if any(isinstance(each, DTensor) for each in model.parameters()):
        return dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))
    return model.state_dict()


def write(content: Any, file: Path, as_safetensors: bool) -> None:
    """Write an object, as a whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    if as_safetensors:
        safetensors.torch.save_file(_without_copies(content), partial, metadata={"format": "pt"})
    else:
        torch.save(content, partial)
    partial.replace(file)


def _without_copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with one name for each tensor, because safetensors refuses tensors that share their memory."""
    found: dict[tuple[int, torch.Size], str] = {}
    for name, each in weights.items():
        found.setdefault((each.data_ptr(), each.shape), name)
    return {name: weights[name].contiguous() for name in found.values()}
