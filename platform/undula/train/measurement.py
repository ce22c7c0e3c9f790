"""What a rank measures in a step: how long its phases take, its losses and samples, and what the script logs.

Also here: numbers that a script records. A float rounds some integers of 2^53 or more, such as ids; their records keep them or are refused.

Also here: steps that a group repeats after a lost worker or a resume: their losses are those of before, or something has begun anew.

What a script keeps in other places than the run's state begins anew in each group: random numbers of its own, counts, averages, what its
dataset or its optimizer has in attributes. Where steps are repeated, this shows, whatever it is.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from struct import pack
from typing import Any, TypeAlias

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor

from undula.data.nested import tensors_of
from undula.errors import StorageError, UsageError
from undula.parallel.device_clock import Mark, mark_on
from undula.plan.keys import Ids, multiset_digest
from undula.plan.plan import MicroBatch
from undula.recovery.progress import Phase
from undula.recovery.worker_state import WorkerState
from undula.state.attempts import Lineage
from undula.state.ledger_files import LEDGER, STEPS, read_each
from undula.state.records import StepRow
from undula.storage import Store
from undula.train.micro_batches import PlacedSamples
from undula.train.step_reduction import LocalStep


def recorded(value: Any) -> float:
    """Return a number of Python, NumPy or torch as a float, or as an integer if a float would round it."""
    number = value.item() if hasattr(value, "item") else value
    rounded = float(number)
    return number if isinstance(number, int) and number != rounded else rounded


def averaged(call: str, name: str, value: Any) -> float:
    """Return a number of which a mean is recorded, as a float.

    Raises:
        UsageError: A float would round it.
    """
    number = recorded(value)
    if isinstance(number, int):
        raise UsageError(
            f"{call} got {name!r} as {number}, which a mean would round to {float(number):.0f}; record it by run.log() between two steps, "
            "which keeps integers, or as text"
        )
    return number


PARTS = ("data_s", "transfer_s", "compute_s", "communication_s")
"""Parts of a step whose duration is measured. The rest of the step is `other_s`."""
Kind: TypeAlias = tuple[tuple[int, ...], ...]
"""Shapes of the tensors of a batch, and the number of parameters that train on it."""


class StepPhases:
    """Records the phases of a rank's steps. A phase may take long if the group has committed no step with such batches yet.

    Args:
        worker: State of this process.
    """

    def __init__(self, worker: WorkerState):
        self._worker = worker
        self._known: set[Kind] = set()
        """Kinds of batches with which this group has committed a step."""
        self._kinds: set[Kind] = set()
        self._began = 0.0

    def begin_step(self) -> None:
        self._kinds, self._began = set(), time.perf_counter()

    def begin_batch(self, batch: Any, num_trainable: int) -> None:
        """Begin a batch for a model with so many trainable parameters, whose number torch.compile takes for granted."""
        self._kinds.add((*(tuple(tensor.shape) for tensor in tensors_of(batch)), (num_trainable,)))

    def enter(self, phase: Phase) -> None:
        self._worker.enter(phase.unless_known(self._kinds <= self._known))

    def committed(self, done: int) -> None:
        """Record that a step was committed, which makes `done` steps."""
        self._worker.progress.committed(done, time.perf_counter() - self._began, self._kinds <= self._known)
        self._known |= self._kinds


class StepMeasurement:
    """Measurements of one step on one rank.

    Args:
        device: Device of the rank.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._began = time.perf_counter()
        self._data_s = 0.0
        self._intervals: list[tuple[str, Mark, Mark]] = []
        self._losses: list[tuple[Tensor, float]] = []
        """Loss of each micro-batch and the number of samples for which it counts."""
        self._ids: list[Ids] = []
        """Ids of the samples of each micro-batch that counts."""
        self._logged: dict[str, list[tuple[float, float]]] = {}
        """Logged values and their weights, by name."""

    def mark(self) -> Mark:
        """Return the current point of the device's work."""
        return mark_on(self._device)

    def add_batch(self, placed: PlacedSamples, counts: bool) -> None:
        """Add a batch when it is used. What was only read ahead does not count, because another group may consume it.

        Args:
            placed: The batch.
            counts: Whether its samples count on this rank.
        """
        if counts:
            self._ids.append(placed.ids)
        self._data_s += placed.data_s
        self._intervals.append(("transfer_s", *placed.waits))

    def add_pass(self, begin: Mark, gradients_ready: Mark | None) -> None:
        """Add the forward and backward pass of a micro-batch, which ends now.

        Args:
            begin: Begin of the forward pass.
            gradients_ready: Time from which only communication remained; None for none.
        """
        end = self.mark()
        ready = gradients_ready or end
        self._intervals += [("compute_s", begin, ready), ("communication_s", ready, end)]

    def add_communication(self, begin: Mark) -> None:
        """Add communication that began at a mark and ends now."""
        self._intervals.append(("communication_s", begin, self.mark()))

    def add_loss(self, loss: Tensor, samples: float) -> None:
        """Add the loss of a micro-batch, which counts for so many samples."""
        self._losses.append((loss.detach().reshape(()).to(torch.float64, copy=True), samples))

    def log(self, values: Mapping[str, float | Tensor], micro_batch: MicroBatch | None) -> None:
        """Add values of the script, for the samples of a micro-batch, or of all batches so far."""
        weights = [float(micro_batch.samples)] if micro_batch else [samples for _, samples in self._losses]
        for name, value in values.items():
            # A value of no samples may be NaN, even if it is multiplied by 0.
            number = averaged("step.log()", name, value)
            self._logged.setdefault(name, []).extend((number, weight) for weight in weights if weight)

    @property
    def losses(self) -> list[Tensor]:
        """Losses of the micro-batches, as scalars on the device."""
        return [loss for loss, _ in self._losses]

    def local(self, losses: Sequence[float]) -> LocalStep:
        """Return the measurements, for the reduction over the ranks. This waits for the device.

        Args:
            losses: Values of `losses`.
        """
        step = LocalStep(logged=self._logged)
        step.seconds["data_s"] = self._data_s
        for name, begin, end in self._intervals:
            step.seconds[name] += end.seconds_since(begin)
        known_s = sum(step.seconds[name] for name in PARTS)
        step.seconds["other_s"] = max(time.perf_counter() - self._began - known_s, 0.0)
        step.sample_digest = multiset_digest(np.concatenate(self._ids)) if self._ids else 0
        step.losses = [loss * samples for loss, (_, samples) in zip(losses, self._losses, strict=True)]
        return step


COLUMNS = "attempt", "step", "loss"


MOST_BYTES = 32 * 2**20
"""Maximum size of the files of the ledger that are read for the comparison, the newest of them."""


MOST_WAITING = 1000
"""Maximum number of steps that wait for the losses of before, after which they are not compared."""


READING_S = 5.0
"""Maximum time in seconds for which the end of a run waits for these losses."""


class RepeatedSteps:
    """Compares the losses of an attempt's steps with those that the ledger has of the same steps, from earlier attempts.

    A thread reads the ledger, so that no step waits for it.

    Args:
        store: Run directory.
        before: Earlier attempts of the run.
        start: Number of steps with which it begins.
    """

    def __init__(self, store: Store, before: Lineage, start: int):
        self._store, self._before, self._start = store, before, start
        self._own: list[StepRow] = []
        """Steps that wait for the comparison."""
        self._former: dict[int, float] | None = None
        """Loss of each step of earlier attempts from `start` on; None until they are read."""
        self._reader = threading.Thread(target=self._read, name="undula-repeated", daemon=True)
        self._reader.start()

    def difference(self, row: StepRow) -> str | None:
        """Return how a step of this attempt differs from the same one of before, given the next step; None if none is known to differ."""
        self._own.append(row)
        if len(self._own) > MOST_WAITING:
            self._own, self._former = [], {}
        return self._compared()

    def last_difference(self) -> str | None:
        """Return the same at the end of the run."""
        self._reader.join(READING_S)
        return self._compared()

    def _compared(self) -> str | None:
        former = self._former
        if former is None:
            return None
        waiting, self._own = self._own, []
        for each in waiting:
            before = former.pop(each.step, None)
            if before is not None and pack("<d", before) != pack("<d", each.loss):
                former.clear()  # one sentence is enough
                return f"step {each.step} had the loss {before:.9g}, and has {each.loss:.9g} now"
        return None

    def _read(self) -> None:
        former: dict[int, tuple[int, float]] = {}
        with suppress(StorageError):
            files = [entry for entry in self._store.list(LEDGER) if STEPS.includes(entry.name.rpartition("/")[2])]
            room = MOST_BYTES
            for entry in sorted(files, key=lambda entry: entry.name, reverse=True):
                room -= entry.bytes
                if room < 0:
                    break
                (rows,) = read_each(self._store, [entry.name.rpartition("/")[2]]).values()
                if isinstance(rows, StorageError):  # it was merged into another file meanwhile
                    continue
                later = rows.filter(pc.field("step") >= self._start)
                for attempt, step, loss in zip(*(later[name].to_pylist() for name in COLUMNS), strict=True):
                    if attempt <= self._before.newest and self._before.includes(attempt):
                        former[step] = max(former.get(step, (attempt, loss)), (attempt, loss))
        self._former = {step: loss for step, (_, loss) in former.items()}
