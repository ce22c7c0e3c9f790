"""A test of a model and its optimizer: does a run with them resume exactly, wherever it is interrupted?

    from undula.testing import conformance

    conformance.check(make_model, make_optimizer, loss, batches)

trains on the batches in this process, once without interruption, and once more for each step boundary: there the state goes through
the formats of snapshots and checkpoints into a fresh model and a fresh optimizer, which train the rest. `check_on_ranks` does so with
whole runs on real ranks whose number changes. Both return if every tensor and value of the state is equal bit for bit, and else raise
an error of one sentence.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undula.data.rows import Batch
from undula.errors import ConformanceError
from undula.parallel.layout import Layout, join_layout
from undula.recovery.live_state import LiveState
from undula.recovery.restore import Restorer
from undula.recovery.snapshot import Snapshot, packed, parsed
from undula.state.checkpoint import Checkpointer
from undula.state.model_state import bare_module, check_state, model_and_optimizer_state
from undula.state.optimizer_state import check_step
from undula.storage import Store
from undula.train.randomness import seed_micro_batch, seed_weights
from undula.train.single_process import world_of_one

PLAN = "conformance"
SEED = 0
Record: TypeAlias = Mapping[str, Any]
"""Copies of the tensors of a state, and its values, by name."""


def nothing(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Do nothing before a step."""


@dataclass(frozen=True)
class Training:
    """What a script trains, and how."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[nn.Module, Batch], Tensor]
    """Mean loss of a model over a batch's samples."""
    before_step: Callable[[int, nn.Module, torch.optim.Optimizer], None] = nothing
    """What the script does before each step, as freezing a layer; called with the number of steps done."""


def check(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module, Batch], Tensor],
    batches: Sequence[Batch],
    before_step: Callable[[int, nn.Module, torch.optim.Optimizer], None] = nothing,
) -> None:
    """Check in this process that a training resumes exactly from every step boundary.

    Args:
        make_model: Makes a fresh model. torch's random state is the same for each call.
        make_optimizer: Makes a fresh optimizer of a model's parameters.
        loss: Mean loss of a model over a batch's samples.
        batches: The batch of each step; three or four steps show most defects.
        before_step: Called before each step with the number of steps done, the model and the optimizer: freeze a layer or add a
            parameter group here, depending on the number of steps done alone.

    Raises:
        ConformanceError: A tensor or a value of the state differs from that of the uninterrupted training.
        UsageError: A run would refuse the model or the optimizer when it starts.
    """
    training = Training(make_model, make_optimizer, loss, before_step)
    with _layout() as layout, TemporaryDirectory() as folder:
        attempt = _Attempt(training, layout, Path(folder))
        boundaries = [attempt.record()]
        for step, batch in enumerate(batches):
            attempt.train(step, batch)
            attempt.save(step + 1)
            boundaries.append(attempt.record())
        for source in ("a snapshot", "a checkpoint"):
            for done in range(len(batches)):
                _check_from(done, source, _Attempt(training, layout, Path(folder)), batches, boundaries)


def first_difference(found: Record, expected: Record) -> str | None:
    """The first tensor or value in which two records differ, and how; None where they are equal bit for bit."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in found or name not in expected:
            return f"{name} is {'missing' if name in expected else 'there only after the interruption'}"
        one, other = found[name], expected[name]
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if (one.dtype, one.shape) != (other.dtype, other.shape):
                return f"{name} is {_kind(one)}, and was {_kind(other)}"
            if not torch.equal(as_bytes(one), as_bytes(other)):
                return f"{name} has other bits"
        elif json.dumps(one) != json.dumps(other):
            return f"{name} is {json.dumps(one)}, and was {json.dumps(other)}"
    return None


def record_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Record:
    """A copy of the whole state, with the buffers that are not persistent."""
    state = model_and_optimizer_state(model, optimizer)
    found = {name: each.clone() if isinstance(each, Tensor) else _json(each) for name, each in state.items()}
    for name, module in bare_module(model).named_modules():
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers[key]
            if buffer is not None:
                found[f"buffer.{name}.{key}, which is not persistent,"] = buffer.clone()
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


class _Attempt:
    """A model and an optimizer in training, fresh at first."""

    def __init__(self, training: Training, layout: Layout, folder: Path):
        seed_weights(SEED)
        self._training = training
        self._layout = layout
        self._folder = folder
        self._model = training.make_model()
        self._optimizer = training.make_optimizer(self._model)
        check_step(self._optimizer)
        check_state(self._model, self._optimizer)
        self._live = LiveState(self._model, self._optimizer)

    def train(self, step: int, batch: Batch) -> None:
        """Do one step."""
        self._training.before_step(step, self._model, self._optimizer)
        seed_micro_batch(SEED, step, virtual_worker=0, micro_batch=0)
        self._training.loss(self._model, batch).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._model.zero_grad()

    def record(self) -> Record:
        return record_of(self._model, self._optimizer)

    def save(self, done: int) -> None:
        """Write a snapshot and a checkpoint."""
        held = self._live.held()
        meta, data = packed(PLAN, (0, done), held, [])
        (self._folder / f"{done}.json").write_bytes(meta)
        (self._folder / f"{done}.data").write_bytes(data)
        checkpoints = self._checkpoints(done)
        checkpoints.save(done, PLAN, held)
        if error := checkpoints.wait():
            raise error

    def restore(self, done: int, source: str) -> None:
        """Go to the state of a step boundary, as a run does in a new process."""

        def find() -> list[Snapshot]:
            meta, data = (self._folder / f"{done}.{kind}" for kind in ("json", "data"))
            return [parsed(meta.read_bytes(), data)] if source == "a snapshot" else []

        Restorer(self._live, self._checkpoints(done), PLAN, 9, self._layout, find).restore(None)

    def _checkpoints(self, done: int) -> Checkpointer:
        return Checkpointer(Store(str(self._folder / f"run-{done}")), self._layout.control, attempt=0, keep=1)


def _check_from(
    done: int, source: str, attempt: _Attempt, batches: Sequence[Batch], boundaries: Sequence[Record]
) -> None:
    """Resume after `done` steps, and compare with the uninterrupted training there and at the end."""
    place = f"after {done} steps, restored from {source}," if done else "in a second training from the beginning"
    if done:
        attempt.restore(done, source)
    if difference := first_difference(attempt.record(), boundaries[done]):
        raise ConformanceError(f"{difference} {place}: it is no part of the state that a run keeps")
    for step in range(done, len(batches)):
        attempt.train(step, batches[step])
    if difference := first_difference(attempt.record(), boundaries[-1]):
        why = "something that is no part of the state has changed" if done else "the training itself is not repeatable"
        raise ConformanceError(f"{difference} at the end of a training that began {place}: {why}")


@contextmanager
def _layout() -> Iterator[Layout]:
    device = torch.device("cpu")
    if dist.is_initialized():
        yield join_layout(0, 1, device)
        return
    with world_of_one(device):
        yield join_layout(0, 1, device)


def _json(value: object) -> Any:
    return json.loads(json.dumps(value))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
