"""What a rank measures in a step: how long its phases take, its losses and samples, and what the script logs."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from undula.data.nested import tensors_of
from undula.parallel.device_clock import Mark, mark_on
from undula.plan.keys import Ids, multiset_digest
from undula.plan.plan import MicroBatch
from undula.recovery.progress import Phase
from undula.recovery.worker_state import WorkerState
from undula.train.micro_batches import PlacedSamples
from undula.train.recorded import averaged
from undula.train.step_reduction import LocalStep

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
