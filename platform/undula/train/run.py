"""The run as the script sees it: the argument of its train function.

def train(run: undula.Run) -> None:
    model = run.model(GPT(run.config.model))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))
    for step in run.steps(validate=loss):
        for batch in step.batches():
            step.backward(loss(batch))
        step.update()
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from undula.data.script.dataset import NO_MAP, IndexedDataset, script_data
from undula.data.script.indexed import IndexedData
from undula.data.script.items import Collate, Items
from undula.data.script.loader_processes import Loader
from undula.data.stored.maps import SampleFunction
from undula.errors import UsageError
from undula.parallel.engines.engine import Engine
from undula.parallel.engines.select import MakeEngine
from undula.parallel.layout import Layout
from undula.parallel.precision import cpu_problem
from undula.plan.plan import Plan
from undula.recovery.progress import BETWEEN_STEPS, VALIDATE
from undula.recovery.replica import ReplicaClient
from undula.recovery.worker_state import Kept, WorkerState
from undula.state.events import LogEvent, WarningEvent
from undula.state.goals import LOSS
from undula.state.model_state import check_state
from undula.state.optimizer_state import check_step
from undula.state.pieces import RankState
from undula.telemetry.messages import Publisher
from undula.train.context import RunSetup, TrainContext
from undula.train.job import Job
from undula.train.learning_rate import GroupRates, OptimizerRates, SchedulerRates
from undula.train.loop import TrainingLoop
from undula.train.model import engine_of, place_model, prepare_module, watch_compilation_of
from undula.train.randomness import compute_deterministically, seed_weights
from undula.train.samples import SampleSource, ScriptSamples, StoredSamples, require_same
from undula.train.script_state import AfterStep, Capture, Restore, ScriptState
from undula.train.step import Step
from undula.train.validation import ValidationFunction


class Run:
    """A run on one rank, as the script uses it.

    Args:
        job: Settings of the job.
        layout: Layout of the worker group.
        worker: State of this process that outlives the group.
        publish: Function that sends messages to the driver.
        replicas: Client of the controller's replica store; None with Ray Train's own controller.
        engine: Function that makes the engine of the model; by default the job's settings select the engine.

    Attributes:
        config: Settings of the script.
        base_lr: Learning rate at the peak of the schedule.
        compute: Number format in which the model computes.
        rank: Rank of this process.
        world_size: Number of ranks.
        device: Device of this rank.
        url: Path or URL of the run directory.
    """

    _warnings: tuple[WarningEvent, ...] = ()
    _engine: Engine | None = None
    _model: nn.Module | None = None
    _optimizer: torch.optim.Optimizer | None = None
    _rates: OptimizerRates | None = None
    _undo: Callable[[], None] | None = None
    _stop_watching: Callable[[], None] | None = None
    _script_samples: ScriptSamples | None = None
    _maps: tuple[SampleFunction | None, SampleFunction | None] = None, None
    _loop: TrainingLoop | None = None
    _has_started = _is_restored = False

    def __init__(
        self,
        job: Job,
        layout: Layout,
        worker: WorkerState,
        publish: Publisher,
        replicas: ReplicaClient | None = None,
        engine: MakeEngine | None = None,
    ):
        self._set_up(RunSetup.of(job, layout, worker, publish, replicas), engine)

    def _set_up(self, setup: RunSetup, engine: MakeEngine | None = None) -> None:
        """Begin the run, without work on its directory or its other ranks."""
        job, layout = setup.job, setup.layout
        self.config, self.url = job.config, job.run_url
        self.base_lr, self.compute = job.schedule.base_lr, job.precision.compute
        self.rank, self.world_size, self.device = layout.rank, layout.world_size, layout.device
        self._setup = setup
        self._make_engine = engine or partial(engine_of, job)
        self._script_state = ScriptState()
        if job.deterministic:
            compute_deterministically()
        seed_weights(job.plan.seed)

    @property
    def plan(self) -> Plan:
        """Plan of the run, which defines the samples of each step."""
        return self._setup.plan

    def keep(self, name: str, make: Callable[[], Kept], close: Callable[[Kept], None] | None = None) -> Kept:
        """Return an object that is made once in each worker process, although the train function runs again when the group changes.

        This is for what takes long to make and does not change, such as a dataset that lists many files.

        Args:
            name: Name of the object in the script.
            make: Function that makes it.
            close: Function that is called with it before the process ends; None for none.
        """
        return self._setup.worker.keep(f"of the script: {name}", make, close)

    def dataset(
        self,
        dataset: IndexedDataset,
        *,
        validation: IndexedDataset | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        name: str | None = None,
        **loader_arguments: object,
    ) -> None:
        """Train on a dataset of the script, if the job's YAML names no data. The driver calls the script up to here, to know its length.

        Random numbers of torch, NumPy and Python that the dataset draws for a sample are keyed by the seed, the epoch and the index, and
        those of `collate_fn` by the micro-batch, so that they depend neither on the loader process nor on the world size.

        Args:
            dataset: Dataset with `__len__` and `__getitem__`, such as a map-style dataset of torch or a `Dataset` of Hugging Face.
            validation: Validation data; without them, the run does not validate.
            collate_fn: Function that makes a micro-batch of a list of samples; by default that of torch's DataLoader.
            num_workers: Number of loader processes of each rank, for the training and for the validation data each; with 0, the rank
                loads samples itself.
            name: Name of the training data, which must change when their content does; by default the fingerprint of a `Dataset` of
                Hugging Face. Without either, a run notices only another length.
            loader_arguments: Other arguments of torch's DataLoader, all of which are refused because the plan decides them.

        Raises:
            UsageError: The run cannot use an argument, the driver got other data, `model` was called before, or the job's YAML names data.
        """
        if self._model is not None:
            raise UsageError("run.dataset() was called after run.model(); call run.dataset() first")
        if self._script_samples is not None:
            raise UsageError("run.dataset() was called twice; call it once, with all samples in one dataset")
        setup = self._setup
        found = script_data(dataset, validation, name, num_workers, loader_arguments)
        require_same(found, setup.job)
        self._script_samples = ScriptSamples(
            setup.job,
            found,
            setup.virtual_workers,
            Items(dataset, collate_fn),
            None if validation is None else Items(validation, collate_fn),
            lambda kept_as: setup.worker.keep(kept_as, lambda: Loader(num_workers), Loader.close),
        )

    def model(self, module: nn.Module) -> nn.Module:
        """Move a module to the device, and give all ranks the weights of rank 0. If the run resumes, `steps` restores its weights.

        A module that torch's `fully_shard` has sharded is not moved, and its weights are not copied between ranks.

        Returns:
            The module that the script must call.

        Raises:
            UsageError: The run already has a model, the module has lazy parameters or is wrapped in DistributedDataParallel, a
                layer is of a subclass of SyncBatchNorm, or no engine can train it with the job's settings, or not on this device.
        """
        if self._script_samples is None and self._setup.job.script_data is not None:
            raise UsageError("run.model() was called before run.dataset(); call run.dataset() first")
        if self._model is not None:
            raise UsageError("run.model() was called twice, but a run has one model; combine several modules into one")
        job, layout = self._setup.job, self._setup.layout
        if layout.device.type == "cpu" and (problem := cpu_problem(job.precision.compute)):
            raise UsageError(problem)
        self._warnings = prepare_module(module)
        self._engine = self._make_engine(module, layout)
        self._model, self._undo = place_model(module, self._engine, job, self.plan)
        return self._model

    def optimizer(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ) -> torch.optim.Optimizer:
        """Register the optimizer. Each step updates the model with it, and sets the learning rate of each of its groups by the schedule.

        Args:
            optimizer: Optimizer of the model's parameters.
            scheduler: Scheduler of torch that replaces the schedule of the job. The loop steps it after each step of the optimizer.

        Returns:
            The optimizer itself.

        Raises:
            UsageError: The run has no model yet, it already has an optimizer, the optimizer is Horovod's, or the run cannot use the
                scheduler.
        """
        if self._model is None or self._engine is None:
            raise UsageError("run.optimizer() was called before run.model(); call run.model() first")
        if hasattr(optimizer, "skip_synchronize"):
            raise UsageError("run.optimizer() got a DistributedOptimizer of Horovod; pass the optimizer that it wraps")
        if self._optimizer is not None:
            raise UsageError(
                "run.optimizer() was called twice, but a run has one optimizer; use one optimizer with several parameter groups"
            )
        self._optimizer = optimizer
        self._engine.prepare(self._model, optimizer)
        schedule = self._setup.job.schedule
        self._rates = (
            GroupRates(optimizer, schedule, self.plan)
            if scheduler is None
            else SchedulerRates(scheduler, schedule, self.plan)
        )
        return optimizer

    def map(self, function: SampleFunction, validation: SampleFunction | None = None) -> None:
        """Transform every sample when it is read, for example to decode, crop or augment it. The function runs in Ray Data's tasks.

        Args:
            function: Function that takes a sample, whose columns are given by name, and a random generator, and returns a sample. The
                generator is keyed by epoch and sample, so that augmentation is the same at any world size and after any resume.
                It must return the same columns, types and shapes for every sample; the first row of the data determines which.
            validation: Function for validation data; by default the same function.

        Raises:
            UsageError: `steps` was called before, or the samples are those of a dataset of the script.
        """
        if self._has_started:
            raise UsageError(
                "run.map() was called after run.steps(), which starts to read samples; call run.map() first"
            )
        if self._setup.job.script_data is not None:
            raise UsageError(NO_MAP)
        self._maps = function, validation or function

    def state(self, name: str, capture: Capture, restore: Restore) -> None:
        """Make values of the script part of the run's state, which snapshots and checkpoints hold and a new group restores.

        `capture` is called when a step is committed, and again when the script asks for the next step. If a group ends in between, the
        script's work after the step, such as its own validation, may be unfinished; the next group must then repeat it.

        Args:
            name: Name of the values in the state.
            capture: Function that returns them: numbers, strings, and lists, tuples or dicts of these. They are equal on all ranks.
            restore: Function that is called before the first step, with the values, and with whether the work after the last step must be
                repeated. It is not called if a run begins.

        Raises:
            UsageError: `steps` was called before, or the name is taken.
        """
        if self._has_started:
            raise UsageError(
                "run.state() was called after run.steps(), which restores the state; call run.state() first"
            )
        self._script_state.add(name, capture, restore)

    def validated(self, means: Mapping[str, float], samples: int) -> None:
        """Record the result of a validation that the script has done itself after a step, or before the first one.

        All ranks call this with the same values, once per step at most. The means appear where those of `validate` would.

        Args:
            means: Means by name, of which one is "loss".
            samples: Number of samples over which they are means.

        Raises:
            UsageError: The loss is missing, or a goal of the job is about another mean.
        """
        if LOSS not in means:
            raise UsageError(
                f"run.validated() got {sorted(means)} without {LOSS!r}; pass the mean loss under that name"
            )
        loop = self._begun("validated")
        loop.add_validation(loop.done, {name: float(mean) for name, mean in means.items()}, samples)

    def log(self, values: Mapping[str, float]) -> None:
        """Record numbers by name between two steps, as an event of the step that was committed last. All ranks may call this."""
        loop = self._begun("log")
        loop.report(LogEvent({name: float(value) for name, value in values.items()}, step=loop.done))

    def save(self) -> None:
        """Ask for a checkpoint at the end of the next step that is committed, in addition to those of `checkpoint.every_steps`."""
        self._begun("save").boundary.is_save_asked = True

    def stop(self, reason: str) -> None:
        """End the run after the step that was committed last, although its plan has more. All ranks call this, after `step.update()`.

        Args:
            reason: Reason, as a sentence without its full stop, which the run's records name.
        """
        self._begun("stop").stop(reason)

    def gather(self, value: object) -> list[Any]:
        """Return a value of every rank, by rank. All ranks call this together, so that it also waits for all of them."""
        self._setup.worker.enter(BETWEEN_STEPS)
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self._setup.layout.control)
        return found

    def alive(self) -> None:
        """Tell the platform that the script makes progress between two steps.

        A worker counts as hung if nothing happens for 600 seconds, or for `workers.hang_limit_s` if that is more. Call this in long work
        of the script, such as its own validation, once for each part of it.
        """
        self._setup.worker.enter(VALIDATE)

    def _begun(self, name: str) -> TrainingLoop:
        if self._loop is None:
            raise UsageError(f"run.{name}() was called before run.steps(); call it in the loop over the steps")
        return self._loop

    def restore(self) -> int:
        """Restore the newest complete state of the run now, and return its number of committed steps. `steps` does this otherwise.

        If the script's work after the last step of the run was not finished, the script can repeat it before it calls `steps`.
        """
        self._loop = self._made_loop(None, None)
        self._is_restored = True
        return self._loop.begin().step

    def steps(self, validate: ValidationFunction | None = None, after_step: AfterStep | None = None) -> Iterator[Step]:
        """Restore the newest complete state of the run, and yield the steps of the plan that follow it.

        Args:
            validate: Function that returns the mean loss of a batch, or several means by name, of which one is "loss". It is called on
                validation data, without gradients and in eval mode: before the first step, every validation.every_steps steps, and after
                the last step.
            after_step: Function for the script's work after a step that needs the validation. It is called on all ranks after each
                step and its validation, before the state is saved, and again by the next group if the former one ended before that.

        Raises:
            UsageError: The model or the optimizer is missing or not supported, or a setting needs validations and `validate` is missing.
        """
        if not self._is_restored:
            self._loop = self._made_loop(validate, after_step)
        elif validate is not None or after_step is not None:
            raise UsageError(
                "run.steps() got validate= or after_step= after run.restore(); do this work in the loop over the steps"
            )
        assert self._loop is not None
        yield from self._loop.steps()

    def _made_loop(self, validate: ValidationFunction | None, after_step: AfterStep | None) -> TrainingLoop:
        self._check_parts(validate)
        self._stop_watching = watch_compilation_of(self._setup.worker.progress)
        return TrainingLoop(self._context(), validate, after_step)

    def _check_parts(self, validate: ValidationFunction | None) -> None:
        """Check that the script has given the run all that its steps need. From now on, nothing can be added."""
        if self._optimizer is None:
            raise UsageError("run.steps() was called before run.model() and run.optimizer(); call both first")
        if validate is None and (goals := self._setup.job.goals):
            key = next(iter(goals))
            raise UsageError(f"{key} needs validations; pass validate= to run.steps(), or remove {key}")
        self._has_started = True
        assert self._model is not None
        check_step(self._optimizer)
        check_state(self._model, self._optimizer)

    def copies(self) -> dict[str, RankState]:
        """Return the copies of the state that this rank has stored, would send or would hand over now, by their purpose, for tests."""
        return self._begun("copies").boundary.copies()

    def hand_over(self) -> None:
        """Hand over the state of the last step boundary to the next worker group of this process, and end the threads beside the loop."""
        if self._loop:
            self._loop.boundary.hand_over()

    def free(self) -> None:
        """Free the model, the optimizer and the dataset. The next group makes new ones, and there may not be memory for both."""
        if self._loop:
            self._loop.boundary.close()
        if self._engine:
            self._engine.close()
        for undo in filter(None, (self._undo, self._stop_watching)):
            undo()
        if self._script_samples:
            self._script_samples.free()
        self._model = self._optimizer = self._engine = self._loop = self._rates = self._undo = None
        self._stop_watching = self._script_samples = None

    def _context(self) -> TrainContext:
        assert self._engine is not None
        assert self._model is not None
        assert self._optimizer is not None
        assert self._rates is not None
        context = TrainContext.of(
            self._setup, self._engine, self._model, self._optimizer, self._rates, self._samples(), self._script_state
        )
        context.warnings = self._warnings
        return context

    def _samples(self) -> SampleSource:
        if self._script_samples is not None:
            return self._script_samples
        setup = self._setup
        assert not isinstance(setup.data, IndexedData), "run.model() refuses a run without its dataset"
        return StoredSamples(setup.job, setup.data, setup.virtual_workers, self._maps)
