"""What stands behind the run that a script sees: in training a worker group, and elsewhere something that commits nothing."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from undula.data.script.indexed import IndexedData, ScriptData
from undula.data.script.items import Items
from undula.data.script.loader_processes import Loader
from undula.data.stored.maps import SampleFunction
from undula.errors import UsageError
from undula.parallel.engines.select import MakeEngine, make_engine
from undula.plan.plan import Plan
from undula.recovery.progress import BETWEEN_STEPS, VALIDATE
from undula.state.model_state import check_state
from undula.state.optimizer_state import check_step
from undula.train.attempt import Attempt
from undula.train.job import Job
from undula.train.loop import TrainingLoop
from undula.train.model import PlacedModel, place_model
from undula.train.parts import ScriptParts
from undula.train.randomness import compute_deterministically, seed_weights
from undula.train.samples import SampleSource, ScriptSamples, StoredSamples, require_same
from undula.train.script_state import AfterStep
from undula.train.setup import RunSetup
from undula.train.validation import ValidationFunction

Kept = TypeVar("Kept")
Check = Callable[[Collection[str]], None]
"""Check of a script, which gets the dotted keys of the job that the user has set."""
Maps = tuple[SampleFunction | None, SampleFunction | None]
"""Transforms of the samples of the training data and of the validation data; None for none."""


class Session(Protocol):
    """What stands behind a run. Every run of a script has the same members and refuses the same things, whatever its session."""

    job: Job
    device: torch.device
    rank: int
    world_size: int

    @property
    def plan(self) -> Plan: ...

    def keep(self, name: str, make: Callable[[], Kept], close: Callable[[Kept], None] | None) -> Kept:
        """Return an object that is made once in this process, which may outlive the run."""

    def alive(self) -> None:
        """Record that the script makes progress."""

    def samples_of(self, data: ScriptData, training: Items, validation: Items | None) -> SampleSource | None:
        """Accept a dataset of the script, and return its samples; None if nothing will read them.

        Raises:
            UsageError: The run cannot use it.
        """

    def preflight(self, check: Check) -> None:
        """Call a check in the driver, with the dotted keys that the user has set; elsewhere, do nothing."""

    def place(self, module: nn.Module) -> PlacedModel:
        """Accept the script's module, and place it on the device.

        Raises:
            UsageError: The run cannot train it.
        """

    def gather(self, value: object) -> list[Any]:
        """Return a value of every rank, by rank."""

    def stored_samples(self, maps: Maps) -> SampleSource:
        """Return the samples of the data that the job's YAML names."""

    def loop(
        self, parts: ScriptParts, validate: ValidationFunction | None, after_step: AfterStep | None
    ) -> TrainingLoop:
        """Return the loop that yields the run's steps."""


class GroupSession:
    """Session of a rank in a worker group.

    Args:
        setup: Parts of the run that the rank knows before it has a model.
        engine_of: Function that makes the engine of the model; by default the job's settings select the engine.
    """

    def __init__(self, setup: RunSetup, engine_of: MakeEngine | None = None):
        self.setup = setup
        self.job, self.plan = setup.job, setup.plan
        self.rank, self.world_size, self.device = setup.layout.rank, setup.layout.world_size, setup.layout.device
        self._attempt: Attempt | None = None  # not the loop, which has the model
        self._make_engine = engine_of or partial(make_engine, settings=setup.job.engine_settings)
        if self.job.deterministic:
            compute_deterministically()
        seed_weights(self.job.plan.seed)

    def keep(self, name: str, make: Callable[[], Kept], close: Callable[[Kept], None] | None) -> Kept:
        return self.setup.worker.keep(name, make, close)

    def alive(self) -> None:
        self.setup.worker.enter(VALIDATE)

    def samples_of(self, data: ScriptData, training: Items, validation: Items | None) -> ScriptSamples:
        require_same(data, self.job)

        def loader_of(name: str) -> Loader:
            return self.keep(name, lambda: Loader(data.num_workers), Loader.close)

        return ScriptSamples(self.job, data, self.setup.layout, training, validation, loader_of)

    def preflight(self, check: Check) -> None:
        """Do nothing, because the driver has done it."""

    def place(self, module: nn.Module) -> PlacedModel:
        return place_model(module, self.job, self.plan, self.setup.layout, self._make_engine)

    def gather(self, value: object) -> list[Any]:
        self.setup.worker.enter(BETWEEN_STEPS)
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.setup.layout.script)
        return values

    def stored_samples(self, maps: Maps) -> SampleSource:
        data = self.setup.data
        assert not isinstance(data, IndexedData), "run.model() refuses a run without its dataset"
        return StoredSamples(self.job, data, self.setup.virtual_workers, maps)

    def loop(
        self, parts: ScriptParts, validate: ValidationFunction | None, after_step: AfterStep | None
    ) -> TrainingLoop:
        check_step(parts.engine.optimizer)
        check_state(parts.model, parts.engine.optimizer)
        loop = TrainingLoop(self.setup, parts, validate, after_step)
        self._attempt = loop.attempt
        return loop

    def require_end(self) -> None:
        """Check, when the script has returned, that it has trained to the end. Other ranks would wait for one that has not.

        Raises:
            UsageError: It has not.
        """
        if self._attempt is None:
            raise UsageError("the script ended without training; let it go through the steps of run.steps()")
        self._attempt.require_end()
