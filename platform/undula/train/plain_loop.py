"""A plain loop in place of a run: it trains a script's train function on recorded micro-batches and adds up their gradients by itself.

The gradient of each micro-batch is taken out of the model before the next one begins, and the step's gradient is their sum. The loop thus
shows what a script means by its step even if the script clears or changes gradients in between. Buffers move as in a run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from undula.data.nested import with_tensors
from undula.parallel.engines.engine import Engine
from undula.parallel.engines.select import make_engine
from undula.parallel.recompute import kept_random_state
from undula.parallel.reduce.tree import added
from undula.parallel.spec import ShardingSpec
from undula.plan.plan import MicroBatch
from undula.plan.tree import Node, combined
from undula.recovery.worker_state import WorkerState
from undula.state.model_state import bare_module, names_in_state
from undula.train.buffers import BufferMean
from undula.train.dry_run.rehearsal import LocalSession
from undula.train.job import Job
from undula.train.loop import TrainingLoop
from undula.train.parts import ScriptParts
from undula.train.randomness import seed_between_steps, seed_micro_batch, seed_update
from undula.train.run import Run
from undula.train.script_state import AfterStep
from undula.train.setup import RunSetup
from undula.train.single_process import local_world
from undula.train.step import Step
from undula.train.step_reduction import exact_sum
from undula.train.validation import ValidationFunction, in_eval_mode

TOLERANCE = 1e-6
"""Largest difference that counts as rounding, relative to the largest element of a parameter, or to 1 if that is larger."""


@dataclass
class RecordedStep:
    """What a step of a run consumed, with the validation after it."""

    index: int
    """Number of the step; -1 for the validation before the first step."""
    samples: int
    lr: float
    batches: list[tuple[MicroBatch, Any]] = field(default_factory=list)
    """Micro-batches that have samples, with their places in the plan."""
    settings: list[dict[str, Any]] = field(default_factory=list)
    """Settings of each group of the optimizer during its step."""
    validated: list[Any] = field(default_factory=list)
    """Batches of the validation after the step."""
    means: Mapping[str, float] | None = None
    """Means of the validation after the step; None if there was none, or the script has no function `after_step`."""

    def add_batch(self, micro_batch: MicroBatch | None, batch: Any) -> None:
        """Add a copy of a micro-batch if it has samples."""
        if micro_batch and micro_batch.samples:
            self.batches.append((micro_batch, copied(batch)))

    def add_settings(self, optimizer: torch.optim.Optimizer) -> None:
        """Add copies of the settings of an optimizer's groups."""
        self.settings = [
            {key: with_tensors(value, torch.clone) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]


def train_plainly(
    train: Callable[[Run], None], job: Job, recorded: Sequence[RecordedStep], device: torch.device
) -> dict[str, Tensor]:
    """Train on recorded steps in a plain loop, and return the parameters at its end by name. The model is whole."""
    job = replace(job, sharding=ShardingSpec())
    with local_world(device):
        session = _PlainSession(job, device, recorded)
        run = Run(session)
        try:
            train(run)
            return session.parameters()
        finally:
            run.free()


class _PlainSession(LocalSession):
    """Session of a run in a plain loop.

    Args:
        job: Settings of the job.
        device: Device of this process.
        recorded: Steps of a run of the same job.
    """

    def __init__(self, job: Job, device: torch.device, recorded: Sequence[RecordedStep]):
        super().__init__(job, device, WorkerState())
        self._recorded = recorded
        # With one virtual worker, there is no sum of several to be formed.
        self._make_engine = partial(make_engine, settings=replace(job.engine_settings, virtual_workers=1))

    def loop(
        self, parts: ScriptParts, validate: ValidationFunction | None, after_step: AfterStep | None
    ) -> TrainingLoop:
        self.parameters = partial(parameters_of, bare_module(parts.engine.module))
        return _PlainLoop(self.setup, parts, validate, after_step, self._recorded)


class _PlainLoop(TrainingLoop):
    """Loop over recorded steps."""

    def __init__(
        self,
        setup: RunSetup,
        parts: ScriptParts,
        validate: ValidationFunction | None,
        after_step: AfterStep | None,
        recorded: Sequence[RecordedStep],
    ):
        super().__init__(setup, parts, None, after_step)
        self._recorded, self._means_of = recorded, validate

    def begin(self) -> int:
        """Begin at the beginning of the run."""
        self.attempt.committed = 0
        return 0

    def steps(self) -> Iterator[Step]:
        """Yield the recorded steps."""
        self.model.guard.close()  # what the script does is checked in a run
        job, baseline = self._setup.job, self.model.baseline
        for recorded in self._recorded:
            if recorded.index >= 0:
                seed_between_steps(job.plan.seed, "before the batches", recorded.index)
                yield PlainStep(self.model.engine, job, recorded)
            baseline.take()
            if self._means_of is not None:
                with kept_random_state(), torch.no_grad(), in_eval_mode(self.model.module):
                    for batch in recorded.validated:
                        self._means_of(copied(batch))
                        baseline.put_back_buffers()
            if self._after is not None and recorded.index >= 0:
                seed_between_steps(job.plan.seed, "after_step", recorded.index + 1)
                self._after(recorded.index + 1, recorded.means)


class PlainStep(Step):
    """Step of a plain loop."""

    def __init__(self, engine: Engine, job: Job, recorded: RecordedStep):
        self.index, self.samples, self.lr, self.merged_steps = recorded.index, recorded.samples, recorded.lr, 1
        self.micro_batch: MicroBatch | None = None
        self.updated = self.is_last = False
        self._engine, self._job, self._recorded = engine, job, recorded
        self._all = (0, job.plan.virtual_workers)
        self._buffers = BufferMean(engine.module)
        self._leaves: dict[nn.Parameter, dict[Node, Tensor | None]] = {}
        """Gradients of each virtual worker. Weights of which the true gradient is zero depend on the order in which these are added."""
        self._loss_sum = 0.0
        self._norm: Tensor | None = None

    def load(self) -> list[Any]:
        return [batch for _, batch in self._recorded.batches]

    def total(self, values: float | Sequence[float]) -> float:
        return exact_sum(values)

    def batches(self) -> Iterator[Any]:
        seed = self._job.plan.seed
        self._buffers.begin_step(self.index, 1)
        for number, (micro_batch, batch) in enumerate(self._recorded.batches, 1):
            self.micro_batch, self.is_last = micro_batch, number == len(self._recorded.batches)
            self._buffers.begin_micro_batch()
            seed_micro_batch(seed, micro_batch.step, micro_batch.virtual_worker, micro_batch.number)
            yield copied(batch)
        self.micro_batch = None
        seed_update(seed, self.index)

    def backward(self, loss: Tensor, share: float | None = None) -> None:
        assert self.micro_batch is not None
        self._engine.free_gradients()
        weight = self.micro_batch.samples / self.samples if share is None else share
        self._loss_sum += float(loss.detach()) * self.micro_batch.samples
        (loss * (weight * self._job.gradient_scale)).backward()  # type: ignore[no-untyped-call]
        self._buffers.end_micro_batch(self.micro_batch.samples, 0)
        for parameter in self._engine.module.parameters():
            if parameter.grad is not None:
                leaves = self._leaves.setdefault(parameter, {(v, v + 1): None for v in range(self._all[1])})
                leaf = (self.micro_batch.virtual_worker, self.micro_batch.virtual_worker + 1)
                leaves[leaf] = added(leaves[leaf], parameter.grad)
                parameter.grad = None

    def keep_gradients(self) -> None:
        """Do nothing, because the gradients of former micro-batches are no longer in the model."""

    def log(self, **values: float | Tensor) -> None:
        """Do nothing, because nothing is recorded."""

    def reduce(self, max_norm: float | None = None) -> Tensor:
        for parameter, leaves in self._leaves.items():
            parameter.grad = combined(self._all, leaves, added)
        self._norm, _ = self._engine.finish_gradients(self.samples, max_norm=max_norm)
        self._buffers.end_step(self.samples)
        return self._norm

    def update(self) -> None:
        norm = self.reduce() if self._norm is None else self._norm
        for group, settings in zip(self._engine.optimizer.param_groups, self._recorded.settings, strict=True):
            group.update(settings)
        seed_update(self._job.plan.seed, self.index)
        self._engine.step()
        self.loss, self.grad_norm = self._loss_sum / self.samples, float(norm)
        self.updated = self.applied = True
        seed_between_steps(self._job.plan.seed, "after the update", self.index + 1)


def copied(batch: Any) -> Any:
    """Return a batch with copies of its tensors."""
    return with_tensors(batch, torch.clone)


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters of a module by name, and its counts and flags: the buffers without fractions."""
    name_of = names_in_state(module)  # which do not depend on what this process has made before
    counts = {
        name_of(name): tensor
        for name, tensor in module.named_buffers()
        if not (tensor.is_floating_point() or tensor.is_complex())
    }
    parameters = {name_of(name): _whole(tensor.detach()).clone() for name, tensor in module.named_parameters()}
    return parameters | {name: tensor.double() for name, tensor in counts.items()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_gap(parameters: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Return the first parameter that differs by more than rounding, and by how much; None if there is none."""
    for name, other in expected.items():
        if not other.numel():
            continue
        gap = float((parameters[name] - other).abs().max())
        if not gap <= TOLERANCE * max(float(other.abs().max()), 1.0):
            return f"{name} differs by {gap:.1e}"
    return None
