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
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from undula.data.script.dataset import IndexedDataset, script_data
from undula.data.script.items import Collate, Items
from undula.data.script.pickling import unpickled
from undula.data.stored.maps import SampleFunction
from undula.errors import StoppedExit, UsageError
from undula.plan.plan import Plan
from undula.state.events import LogEvent, WarningEvent
from undula.state.goals import LOSS, GoalSpec, StopSpec
from undula.state.pieces import RankState
from undula.train.launched_habits import refusal_of
from undula.train.loop import TrainingLoop
from undula.train.measurement import averaged, recorded
from undula.train.parts import GivenParts, require_functions
from undula.train.script_state import AfterStep, Capture, Restore
from undula.train.session import Check, GroupSession, Kept, Session
from undula.train.step import Step
from undula.train.validation import ValidationFunction


class Run:
    """A run on one rank, as the script uses it.

    Args:
        session: What stands behind the run.

    Attributes:
        config: Settings of the script.
        base_lr: Learning rate at the peak of the schedule.
        compute: Number format in which the model computes.
        sharding_stage: Value of `sharding.stage`, 0 if the run does not shard the model.
        rank: Rank of this process.
        world_size: Number of ranks.
        device: Device of this rank.
        url: Path or URL of the run directory.
    """

    _loop: TrainingLoop | None = None
    _is_restored = False
    has_left = False
    """Whether the script has ended before the run, so that its state is handed over."""

    def __init__(self, session: Session):
        job = session.job
        self.config, self.url = unpickled(job.config), job.run_url
        self.base_lr, self.compute = job.schedule.base_lr, job.precision.compute
        self.sharding_stage = job.sharding.stage
        self.rank, self.world_size, self.device = session.rank, session.world_size, session.device
        self._session = session
        self._parts = GivenParts(session)

    @property
    def plan(self) -> Plan:
        """Plan of the run, which defines the samples of each step."""
        return self._session.plan

    @property
    def last_step(self) -> int:
        """Number of steps after which the run ends: that of the plan, or less in a smoke test."""
        return self._session.job.last_step(self._session.plan)

    @property
    def virtual_workers(self) -> int:
        """Number of virtual workers of the plan, which is known before the data are."""
        return self._session.job.plan.virtual_workers

    @property
    def goals(self) -> Mapping[str, GoalSpec | StopSpec | None]:
        """Goals by the key of their setting, `stop` and `checkpoint.keep_best`; None for a goal that the job does not have."""
        job = self._session.job
        return {"stop": job.stop, "checkpoint.keep_best": job.checkpoint.keep_best}

    @property
    def means(self) -> Mapping[str, float]:
        """Means of the newest validation by name; empty before the first one."""
        return self._loop.means if self._loop else {}

    def keep(self, name: str, make: Callable[[], Kept], close: Callable[[Kept], None] | None = None) -> Kept:
        """Return an object that is made once in each worker process, although the train function runs again when the group changes.

        This is for what takes long to make and does not change, such as a dataset that lists many files.

        Args:
            name: Name of the object in the script.
            make: Function that makes it.
            close: Function that is called with it before the process ends; None for none.
        """
        return self._session.keep(f"of the script: {name}", make, close)

    def dataset(
        self,
        dataset: IndexedDataset,
        *,
        validation: IndexedDataset | None = None,
        collate_fn: Collate | None = None,
        validation_collate_fn: Collate | None = None,
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
            validation_collate_fn: The same for the validation data; by default `collate_fn`.
            num_workers: Number of loader processes of each rank, for the training and for the validation data each; with 0, the rank
                loads samples itself.
            name: Name of the data, which must change when their content does; `data.name` of the YAML takes its place. By default, it is
                the fingerprint of a `Dataset` of Hugging Face, or else a run notices only another length.
            loader_arguments: Other arguments of torch's DataLoader, all of which are refused because the plan decides them.

        Raises:
            UsageError: The run cannot use an argument, the driver got other data, `model` was called before, or the job's YAML names data.
        """
        named = self._session.job.data.name or name
        data = script_data(dataset, validation, named, num_workers, loader_arguments)
        validation_items = None if validation is None else Items(validation, validation_collate_fn or collate_fn)
        self._parts.add_dataset(data, Items(dataset, collate_fn), validation_items)

    def preflight(self, check: Check) -> None:
        """Call a check in the driver only, which ends the script at `model`. It gets the dotted keys of the job that the user has set."""
        self._session.preflight(check)

    def model(self, module: nn.Module) -> nn.Module:
        """Move a module to the device, and give all ranks the weights of rank 0. If the run resumes, `steps` restores its weights.

        With `sharding.stage`, the module is sharded over the ranks, and has other parameters afterwards. A module that the script has
        sharded with torch's `fully_shard` is not moved, and its weights are not copied between ranks.

        Returns:
            The module that the script must call.

        Raises:
            UsageError: The run already has a model, the module has lazy parameters or is wrapped in DistributedDataParallel, a
                layer is of a subclass of SyncBatchNorm, or no engine can train it with the job's settings, or not on this device.
        """
        return self._parts.place(module)

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
        self._parts.add_optimizer(optimizer, scheduler)
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
        self._parts.add_maps(function, validation or function)

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
        self._parts.add_state(name, capture, restore)

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
        loop.add_validation(
            loop.done, {name: averaged("run.validated()", name, mean) for name, mean in means.items()}, samples
        )

    def log(self, values: Mapping[str, float]) -> None:
        """Record numbers by name between two steps or after the last, as an event of the newest step. All ranks may call this.

        Integers stay whole in the ledger, also those of 2^53 or more, which TensorBoard and trackers round.
        """
        loop = self._begun("log")
        loop.attempt.report(LogEvent({name: recorded(value) for name, value in values.items()}, step=loop.done))

    def warn_of_state(self, name: str) -> None:
        """Record an event which says that a step changes a tensor beside the model, for adapters. All ranks may call this."""
        loop = self._begun("warn_of_state")
        loop.attempt.report(WarningEvent("state_beside_model", name, step=loop.done))

    @property
    def has_weights_of_step(self) -> bool:
        """Whether the parameters are those of the newest step, while its validation or `after_step` runs. This waits for the device."""
        return self._loop is None or self._loop.model.baseline.is_intact

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
        return self._session.gather(value)

    def alive(self) -> None:
        """Tell the platform that the script makes progress between two steps.

        A worker counts as hung if nothing happens for 600 seconds, or for `workers.hang_limit_s` if that is more. Call this in long work
        of the script, such as its own validation, once for each part of it.
        """
        self._session.alive()

    def _begun(self, name: str) -> TrainingLoop:
        if self._loop is None:
            raise UsageError(f"run.{name}() was called before run.steps(); call it in the loop over the steps")
        return self._loop

    def restore(self) -> int:
        """Restore the newest complete state of the run now, and return its number of committed steps. `steps` does this otherwise.

        If the script's work after the last step of the run was not finished, the script can repeat it before it calls `steps`.
        """
        self._loop, self._is_restored = self._made_loop(None, None), True
        return self._loop.begin()

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
        require_functions(validate=validate, after_step=after_step)
        return self._session.loop(self._parts.complete(validate is not None), validate, after_step)

    def copies(self) -> dict[str, RankState]:
        """Return the copies of the state that this rank has stored, would send or would hand over now, by their purpose, for tests."""
        loop = self._begun("copies")
        return loop.saver.copies(loop.done)

    def hand_over(self) -> None:
        """Hand over the state of the last step boundary to the next worker group of this process, and end the threads beside the loop."""
        self.has_left = True
        if self._loop:
            self._loop.hand_over()

    def free(self) -> None:
        """Free the model, the optimizer and the dataset. The next group makes new ones, and there may not be memory for both."""
        if self._loop:
            self._loop.close()
        self._parts.free()
        self._loop = None


def call_train(train: Callable[[Run], None], run: Run, session: GroupSession) -> None:
    """Call a train function on a rank. `sys.exit()` is its end like any other, which is too early before the run's.

    Raises:
        UsageError: It has ended before the run, or with an exit status.
        Exception: Any exception that the script raises.
    """
    try:
        train(run)
    except StoppedExit:
        raise
    except Exception as error:
        if refusal := refusal_of(error):
            raise refusal from error
        raise
    except SystemExit as end:
        if end.code:
            raise refusal_of(end) or UsageError(
                f"the script ended rank {run.rank} with sys.exit({end.code!r}); raise an exception that says why"
            ) from end
        session.require_end()  # here, so that the traceback of its error has the place of the exit
    else:
        session.require_end()
