"""Session and loop of a count: they give a script one step for each setting, and count what the step takes."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from undula.data.nested import tensors_of
from undula.data.script.indexed import ScriptData
from undula.data.script.items import Items
from undula.errors import UsageError
from undula.parallel.activations import keep_activations
from undula.parallel.engines.engine import Engine
from undula.parallel.layout import Layout
from undula.parallel.materialize import is_on_meta, materialize
from undula.parallel.precision import Autocast, dtype_of
from undula.parallel.sharding import set_up_optimizer
from undula.parallel.spec import ActivationsSpec
from undula.parallel.units import units_of
from undula.plan.host_memory import NO_DATA, DataCount
from undula.plan.memory import PassCount, StateCount
from undula.plan.plan import MicroBatch, OptimizerStep
from undula.plan.precision import FP32, Compute
from undula.recovery.snapshot import aligned_bytes
from undula.recovery.worker_state import LeaveGroup, WorkerState
from undula.state.pieces import Piece
from undula.state.values import leaves
from undula.train.boundary import StepBoundary
from undula.train.dry_run.fakes import FakeRows, make_fake, put_back
from undula.train.dry_run.rehearsal import LocalSession, RehearsalLoop
from undula.train.dry_run.storages import LiveStorages, WithoutAttentionDropout, storage_bytes
from undula.train.dry_run.units import CountedUnits, uncounted_sharding
from undula.train.job import Job
from undula.train.loop import TrainingLoop
from undula.train.measurement import StepMeasurement, StepPhases
from undula.train.micro_batches import MicroBatches
from undula.train.model import PlacedModel, place_model
from undula.train.parts import ScriptParts
from undula.train.script_state import AfterStep
from undula.train.step import Step
from undula.train.step_reduction import StepTotals, Wants
from undula.train.validation import ValidationFunction

PROGRESS = logging.getLogger("undula.counting")
"""Log of which setting is counted."""


@dataclass(frozen=True)
class Setting:
    """Settings of which a step is counted."""

    compute: Compute
    activations: ActivationsSpec
    samples: int
    """Number of samples in a micro-batch."""


@dataclass(frozen=True)
class Count:
    """What was counted of a job."""

    state: StateCount
    passes: dict[Setting, PassCount]
    is_fake: bool
    """Whether the steps had no values. Otherwise they were real ones on the CPU."""
    tokens: int | None = None
    """Number of tokens of each sample; None if it is not known."""
    data: DataCount = NO_DATA
    """What reading a dataset of the script needs; nothing for stored data, which are not counted here."""
    may_need_less: bool = False
    """Whether steps may need less memory on a GPU than where they were counted."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Error of each setting that the model cannot have, by its override."""


class CountingSession(LocalSession):
    """Session of a count.

    Args:
        job: Settings of the job.
        device: Device of the tensors.
        worker: State of this process.
        settings: Settings of the steps.
        is_fake: Whether the model and the batches have no values.
        stack: Stack of contexts that end with the script.
        placed: Function that is called with the bytes of the model.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        worker: WorkerState,
        settings: Sequence[Setting],
        is_fake: bool,
        stack: ExitStack,
        placed: Callable[[int], None],
    ):
        super().__init__(replace(job, compile=False), device, worker)
        self.rank, self.world_size = 1, 2  # so that a script does not do what rank 0 should do, such as writing files
        self._settings, self._stack, self._placed = settings, stack, placed
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else None
        self._live = LiveStorages()
        self._loop: CountingLoop | None = None
        self._data = NO_DATA
        self._units: CountedUnits | None = None
        """Units of the model, if it is to be sharded."""
        if not job.data.is_of_script:
            self._enter_modes()

    @property
    def count(self) -> Count:
        """What was counted.

        Raises:
            UsageError: The script has not trained.
        """
        if self._loop is None:
            raise UsageError("the script ended without training; let it go through the steps of run.steps()")
        lengths = self._loop.lengths
        tokens = next(iter(lengths)) if len(lengths) == 1 else None
        is_fake, may_need_less = self._fakes is not None, self._live.has_whole_attention
        return Count(self._loop.state, self._loop.passes, is_fake, tokens, self._data, may_need_less)

    @property
    def begun(self) -> Setting | None:
        """Setting whose step has begun last; None before the first one."""
        return self._loop.begun if self._loop else None

    def gather(self, value: object) -> list[Any]:
        """Return the value for each rank of the group that this process pretends to be in."""
        return [value] * self.world_size

    def _enter_modes(self) -> None:
        self._stack.enter_context(WithoutAttentionDropout())
        if self._fakes is not None:
            self._stack.enter_context(self._fakes)
        self._stack.enter_context(self._live)

    def samples_of(self, data: ScriptData, training: Items, validation: Items | None) -> Any:
        samples = super().samples_of(replace(data, num_workers=0), training, validation)
        if data.num_workers:
            sets = [each for each in (training, validation) if each is not None]
            size = sum(each.pickled_bytes() for each in sets)
            # The worker has the dataset and its pickled form.
            self._data = DataCount(loaders=data.num_workers * len(sets), dataset_bytes=size * (data.num_workers + 2))
        self._enter_modes()
        return samples

    def place(self, module: nn.Module) -> PlacedModel:
        """Place the module without the settings of activations and precision, which each step has of its own."""
        sharding = self.job.sharding
        if problem := uncounted_sharding(module, sharding):
            raise UsageError(problem)
        if is_on_meta(module) and sharding.stage:
            materialize(module, module.modules(), self.setup.layout.device, has_values=self._fakes is None)
        if self._fakes is not None:
            self._stack.callback(put_back, make_fake(module, self._fakes))
        units = list(units_of(module, sharding.units).values()) if sharding.stage else []
        tensors = [*module.parameters(), *module.buffers()]
        for tensor in tensors:
            self._live.add(tensor)
        self._placed(storage_bytes(tensors))
        job = replace(self.job, activations=ActivationsSpec(), precision=FP32)
        if sharding.stage:
            self._units = CountedUnits(module, units)
            self._stack.callback(self._units.remove)
        give = self._units.give_gradients if self._units else _give_nothing
        return place_model(
            module,
            job,
            self.plan,
            self.setup.layout,
            lambda module, layout: _CountedEngine(layout, sharding.stage > 0, give),
        )

    def loop(
        self, parts: ScriptParts, validate: ValidationFunction | None, after_step: AfterStep | None
    ) -> TrainingLoop:
        self._loop = CountingLoop(self, parts, self._settings, self._live, self._fakes, self._units)
        return self._loop


def _give_nothing() -> None:
    """Do nothing, because all gradients are there."""


class _CountedEngine(Engine):
    """Engine of a rank alone, without the buffers of the sum over the virtual workers, whose size follows from that of the gradient.

    Args:
        layout: Layout of the rank.
        is_sharded: Whether the model is sharded in a run. Here it stays whole.
        give_gradients: Function that completes the gradients of a step.
    """

    def __init__(self, layout: Layout, is_sharded: bool, give_gradients: Callable[[], None]):
        super().__init__(layout)
        self._is_sharded, self._give_gradients = is_sharded, give_gradients

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Accept an optimizer, which computes as that of a sharded model does if the model is to be sharded."""
        if self._is_sharded:
            set_up_optimizer(optimizer, self.parameters, self.layout.device, is_chosen=True)
        super().prepare(model, optimizer)

    def place(self, module: nn.Module) -> nn.Module:
        """Take the module as it is: fake parameters cannot be moved."""
        self._attach(module)
        return module

    def finish_gradients(
        self, samples: int, *, max_norm: float | None = None, loss_scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Leave the gradients as they are: a norm takes little memory, and its rounding depends on values."""
        self._give_gradients()
        return torch.ones((), device="cpu"), torch.zeros((), device="cpu")


class CountingLoop(RehearsalLoop):
    """Loop that yields a step for each setting, and counts it.

    Args:
        session: Session of the count.
        parts: What the script has given to the run.
        settings: Settings of the steps.
        live: Counter of the storages.
        fakes: Mode of the fake tensors; None if tensors are real.
        units: Units of the model, if it is to be sharded.

    Attributes:
        passes: What was counted of the micro-batches, by setting.
        state: What was counted of the states.
        begun: Setting whose step has begun last; None before the first one.
        lengths: Numbers of tokens of the samples of each micro-batch, among them None if one has none that is known.
    """

    def __init__(
        self,
        session: CountingSession,
        parts: ScriptParts,
        settings: Sequence[Setting],
        live: LiveStorages,
        fakes: FakeTensorMode | None,
        units: CountedUnits | None,
    ):
        super().__init__(session.setup, parts)
        setup = session.setup
        self._units, self._gathers_16_bits = units, session.job.sharding.gather == "compute"
        self.boundary = self._own_boundary = _NoBoundary(setup, self.model, parts.state, self.attempt, self.saver)
        self._settings, self._live, self._fakes = settings, live, fakes
        self.passes: dict[Setting, PassCount] = {}
        self.begun: Setting | None = None
        self.lengths: set[int | None] = set()
        module, optimizer = self.model.engine.module, self.model.optimizer
        parameters = [*module.parameters()]
        trainable = self.model.engine.trainable
        own, buffers = storage_bytes(parameters), storage_bytes([*module.buffers()])
        begun = storage_bytes([*optimizer.state.values()])
        self.state = StateCount(
            parameters=sum(each.numel() for each in parameters),
            trainable=sum(each.numel() for each in trainable),
            parameter_bytes=own,
            buffer_bytes=buffers,
            other_bytes=live.bytes - own - buffers - begun,
            gradient_bytes=0,
            largest_bytes=max((each.nbytes for each in trainable), default=0),
            optimizer_bytes=begun,
            update_bytes=0,
            update_moved_bytes=0,
        )
        optimizer.register_step_pre_hook(self._begin_update)
        optimizer.register_step_post_hook(self._end_update)

    def steps(self) -> Iterator[Step]:
        """Yield the steps, and leave the train function as a run leaves it when its group ends."""
        setup = self._setup
        reader = FakeRows(self._parts.samples.training(0), self._live, self._fakes, self.lengths)
        self._closing.callback(reader.close)
        self.begin()
        first, *others = self._settings
        # The first update makes the state of the optimizer, and the second one shows what an update takes beside it. More of them would
        # only take time.
        for place, setting in enumerate((first, first, *others)):
            text = f"counting {setting.compute}, {max(place, 1)} of {len(self._settings)} settings"
            PROGRESS.debug(f"{text} ..." if self._fakes else f"{text}, with real steps ...")
            self._own_boundary.skips = place > 1
            work = [MicroBatch(0, 0, number, setting.samples) for number in range(2)]
            self._batches = MicroBatches(_constant(work), reader, setup.layout.device, setup.worker.enter)
            self.begun = setting
            with self._applied(setting):
                step = _CountedStep(
                    self._live, self._units, setup, self.model, self._batches, self.boundary, self._phases, 0
                )
                yield step
            self.passes[setting] = step.counted
        raise LeaveGroup

    @contextmanager
    def _applied(self, setting: Setting) -> Iterator[None]:
        """Let the model keep activations and compute as a setting says."""
        engine, units = self.model.engine, self._units
        undo = keep_activations(engine.module, setting.activations, units is not None)
        dtype, autocast = dtype_of(setting.compute), None
        if units and self._gathers_16_bits:
            units.gather_in(dtype)
        elif dtype:
            autocast = Autocast(engine.module, self._setup.layout.device, dtype)
        try:
            yield
        finally:
            if autocast:
                autocast.remove()
            undo()

    def _begin_update(self, optimizer: object, args: object, kwargs: object) -> None:
        self._live.begin()

    def _end_update(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        made = self._live.bytes - self._live.before
        gradients = storage_bytes([parameter.grad for parameter in self.model.engine.trainable])
        self.state = replace(
            self.state,
            gradient_bytes=gradients,
            optimizer_bytes=self.state.optimizer_bytes + made,
            update_bytes=self._live.peak - self._live.bytes,
            update_moved_bytes=int(self._live.work.moved_bytes),
            snapshot_bytes=self._snapshot_bytes(),
            units=self._units.with_state(optimizer.state) if self._units else (),
        )

    def _snapshot_bytes(self) -> int:
        """Return the size of a snapshot. `LiveState` would refuse fake tensors."""
        pieces = (value.tensor for value in self._beside().values() if isinstance(value, Piece))
        saved = leaves([self.model.engine.module.state_dict(), self.model.optimizer.state_dict(), [*pieces]])
        return sum(aligned_bytes(value) for value in saved if isinstance(value, Tensor))


def _constant(work: list[MicroBatch]) -> Callable[[int], list[MicroBatch]]:
    return lambda _index: work


class _NoBoundary(StepBoundary):
    """Boundary of steps that have no values to commit.

    Attributes:
        skips: Whether steps leave out the update, as if their gradients had overflowed.
    """

    skips = False

    def reduce(
        self, step: OptimizerStep, measured: StepMeasurement, phases: StepPhases, norm: Tensor, overflows: Tensor
    ) -> StepTotals:
        """Return totals in which each value is one that a script can use."""
        return StepTotals(float(step.samples), 0, {}, 0.0, 0, 1.0, self.skips, 0, True, True, 0.0, Wants(), {})

    def committed(self, step: OptimizerStep, totals: StepTotals, lr: float, measured: dict[str, float]) -> None:
        """Record nothing."""

    def settle(self, owed_since: int | None, place: int) -> None:
        """Keep no copies of the state."""


class _CountedStep(Step):
    """Step that counts the passes of its two micro-batches."""

    def __init__(self, live: LiveStorages, units: CountedUnits | None, *args: Any) -> None:
        super().__init__(*args)
        self._live, self._units = live, units
        self._counted: list[PassCount] = []

    @property
    def counted(self) -> PassCount:
        """What was counted."""
        first, later = self._counted
        return replace(first, later_bytes=later.later_bytes)

    def batches(self) -> Iterator[Any]:
        for batch in super().batches():
            assert self.micro_batch is not None
            self._samples, self._batch_bytes = self.micro_batch.samples, storage_bytes([*tensors_of(batch)])
            self._live.begin_with_next()
            yield batch

    def backward(self, loss: Tensor, share: float | None = None) -> None:
        live, before = self._live, self._live.before
        saved, forward, live.peak = live.bytes - before, live.peak - before, live.bytes
        super().backward(loss, share)
        backward = live.peak - before
        if self._units:
            self._units.end_pass()
        self._counted.append(
            PassCount(
                self._samples,
                self._batch_bytes,
                saved,
                forward,
                backward,
                backward,
                live.work,
                self._units.gathered_share if self._units else 1.0,
            )
        )
