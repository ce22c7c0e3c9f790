"""Records of a run's state, and their comparison bit for bit."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from undula import extensions
from undula.errors import ConformanceError
from undula.state.model_state import MODEL, OPTIMIZER, bare_module, model_and_optimizer_state
from undula.state.pieces import RankState, is_sharded_tensor

Record: TypeAlias = Mapping[str, tuple[str, bytes]]
"""Kind and bytes of each tensor and value of a state, by name."""


def record_of(model: nn.Module, optimizer: torch.optim.Optimizer, is_whole: bool = False) -> Record:
    """A copy of the state of this rank, with the buffers that are not persistent.

    Args:
        model: Model of the run.
        optimizer: Optimizer of the run.
        is_whole: Whether to gather what the ranks have in shards. All ranks must call this then.
    """
    state = model_and_optimizer_state(model, optimizer)
    if is_whole:
        state = {name: value.full_tensor() if is_sharded_tensor(value) else value for name, value in state.items()}
    record = {name: _leaf(value) for name, value in state.items()}
    for name, module in bare_module(model).named_modules():
        for key in module._non_persistent_buffers_set:
            if (buffer := module._buffers[key]) is not None:
                record[f"buffer.{name}.{key}, which is not persistent,"] = _leaf(buffer)
    return record


def first_difference(actual: Record, expected: Record) -> str | None:
    """The first tensor or value in which two records differ, and how; None where they are equal bit for bit."""
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual or name not in expected:
            return f"{name} is {'missing' if name in expected else 'there only after an interruption'}"
        (kind, bits), (expected_kind, expected_bits) = actual[name], expected[name]
        if kind != expected_kind:
            return f"{name} is {kind}, and was {expected_kind}"
        if bits != expected_bits:
            return f"{name} has other bits"
    return None


def record_of_copy(state: RankState) -> Record:
    """A record of what a copy of the state has of the model and the optimizer."""
    return {name: _leaf(value) for name, value in state.whole().items() if _is_stored(name)}


def record_of_parts(state: RankState) -> Record:
    """A record of what parts of the step of other packages have in a copy of the state; of tensors, those that this rank has whole."""
    added = tuple(f"{name}." for name in extensions.names("undula.parts", {}))
    tensors = {name: piece.tensor for name, piece in state.pieces.items() if piece.is_whole}
    return {name: _leaf(value) for name, value in {**tensors, **state.values}.items() if name.startswith(added)}


def stored_part(record: Record) -> Record:
    """The part of a record that copies of the state have."""
    return {name: leaf for name, leaf in record.items() if _is_stored(name)}


class Recorded(Protocol):
    """A run whose state is recorded at its step boundaries."""

    def record(self) -> Record: ...


@dataclass(frozen=True)
class Recorder:
    """Records the states of a run by the number of steps done."""

    boundaries: dict[int, Record]

    def __call__(self, done: int, run: Recorded) -> None:
        self.boundaries[done] = run.record()


@dataclass(frozen=True)
class Comparison:
    """Compares a run with the uninterrupted one."""

    boundaries: Mapping[int, Record]
    run: str
    """The run, for messages."""

    def __call__(self, done: int, run: Recorded) -> None:
        if difference := first_difference(run.record(), self.boundaries[done]):
            raise ConformanceError(f"{difference} after {done} steps of {self.run}")


def _is_stored(name: str) -> bool:
    return name.startswith((MODEL, OPTIMIZER))


def _leaf(value: Any) -> tuple[str, bytes]:
    if not isinstance(value, Tensor):
        return "a value", json.dumps(value).encode()
    local = getattr(value, "to_local", lambda: value)()
    kind = f"{str(local.dtype).removeprefix('torch.')} of shape {tuple(local.shape)} with strides {local.stride()}"
    return kind, local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
