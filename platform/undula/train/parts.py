"""What the script gives to its run before the first step: samples, a model, an optimizer, and values of its own, in this order."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from undula.data.script.dataset import NO_MAP
from undula.data.script.indexed import ScriptData
from undula.data.script.items import Items
from undula.data.stored.maps import SampleFunction
from undula.errors import UsageError
from undula.parallel.engines.engine import Engine
from undula.state.events import WarningEvent
from undula.train.given import Given
from undula.train.launched_habits import SHARDS_STATE
from undula.train.learning_rate import OptimizerRates, rates_of
from undula.train.model import PlacedModel
from undula.train.samples import SampleSource
from undula.train.script_state import Capture, Restore, ScriptState

if TYPE_CHECKING:
    from undula.train.session import Maps, Session

_SHARDING = {"ZeroRedundancyOptimizer", "OSS", "DistributedFusedAdam", "DistributedFusedLAMB"}
"""Classes of torch, FairScale and Apex that shard the state of an optimizer."""


@dataclass(frozen=True)
class ScriptParts:
    """All parts that the steps of a run need from the script."""

    engine: Engine
    """Engine of the model, which has been given the optimizer."""
    model: nn.Module
    """Module that the script calls."""
    rates: OptimizerRates
    """Learning rates of the optimizer."""
    given: Given
    """What the script and the job have given, for comparison with a restored state."""
    samples: SampleSource
    state: ScriptState
    """Values that belong to the state of the run."""
    validates: bool
    """Whether the script has a function that validates."""
    model_warnings: tuple[WarningEvent, ...]

    def warnings(self, start: int) -> Iterator[WarningEvent]:
        """Yield the warnings about these parts after `start` committed steps; most are for the beginning of the run."""
        has_validation = self.samples.has_validation
        if not self.validates and has_validation:
            yield WarningEvent("no_validation")
        if start == 0:
            yield from self.model_warnings
            if self.rates.warning:
                yield WarningEvent("batch_rule", self.rates.warning)
            if self.rates.others:
                yield WarningEvent("other_rates", self.rates.others)
            if self.validates and not has_validation:
                yield WarningEvent("no_validation_data")


class GivenParts:
    """Parts that the script has given so far. Each method raises UsageError if it is called too late, too early or twice.

    Args:
        session: What stands behind the run.
    """

    _has_dataset = _is_complete = False
    _samples: SampleSource | None = None
    _maps: "Maps" = None, None
    _placed: PlacedModel | None = None
    _rates: OptimizerRates | None = None
    _given: Given | None = None

    def __init__(self, session: "Session"):
        self._session = session
        self._state = ScriptState()

    def add_dataset(self, data: ScriptData, training: Items, validation: Items | None) -> None:
        """Add a dataset of the script."""
        if self._placed is not None:
            raise UsageError(
                "run.dataset() was called after run.model(); call run.dataset() first, and train once in a run: what a second train() or "
                "fit() of a script does is another job"
            )
        if self._has_dataset:
            raise UsageError("run.dataset() was called twice; call it once, with all samples in one dataset")
        self._samples = self._session.samples_of(data, training, validation)
        self._has_dataset = True

    def add_maps(self, training: SampleFunction, validation: SampleFunction) -> None:
        """Add transforms of the stored samples."""
        if self._is_complete:
            raise UsageError(
                "run.map() was called after run.steps(), which starts to read samples; call run.map() first"
            )
        if self._session.job.data.is_of_script:
            raise UsageError(NO_MAP)
        self._maps = training, validation

    def add_state(self, name: str, capture: Capture, restore: Restore) -> None:
        """Add values of the script."""
        if self._is_complete:
            raise UsageError(
                "run.state() was called after run.steps(), which restores the state; call run.state() first"
            )
        self._state.add(name, capture, restore)

    def place(self, module: nn.Module) -> nn.Module:
        """Add the model, and return the module that the script calls."""
        if not self._has_dataset and self._session.job.script_data is not None:
            raise UsageError("run.model() was called before run.dataset(); call run.dataset() first")
        if self._placed is not None:
            raise UsageError("run.model() was called twice, but a run has one model; combine several modules into one")
        self._placed = self._session.place(module)
        return self._placed.model

    def add_optimizer(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
        """Add the optimizer of the model, and a scheduler that replaces the job's schedule."""
        if self._placed is None:
            raise UsageError("run.optimizer() was called before run.model(); call run.model() first")
        if hasattr(optimizer, "skip_synchronize"):
            raise UsageError("run.optimizer() got a DistributedOptimizer of Horovod; pass the optimizer that it wraps")
        if _SHARDING & {kind.__name__ for kind in type(optimizer).__mro__}:
            raise UsageError(f"run.optimizer() got a {type(optimizer).__name__}, which {SHARDS_STATE}")
        if self._rates is not None:
            raise UsageError(
                "run.optimizer() was called twice, but a run has one optimizer; use one optimizer with several parameter groups"
            )
        rates = rates_of(optimizer, scheduler, self._session.job.schedule, self._session.plan)
        self._given = Given.of(self._session.job, self._placed.model, optimizer, scheduler)
        self._placed.engine.prepare(self._placed.model, optimizer)
        self._rates = rates

    def complete(self, validates: bool) -> ScriptParts:
        """Return all parts, after which none can be added.

        Args:
            validates: Whether the script has a function that validates.
        """
        placed, rates, given = self._placed, self._rates, self._given
        if placed is None or rates is None or given is None:
            raise UsageError("run.steps() was called before run.model() and run.optimizer(); call both first")
        no_function = "run.steps() got no function", "pass validate= to it"
        if not validates and (problem := self._session.job.problem_without_validation(*no_function)):
            raise UsageError(problem)
        self._require_names(placed)
        self._is_complete = True
        samples = self._samples or self._session.stored_samples(self._maps)
        return ScriptParts(placed.engine, placed.model, rates, given, samples, self._state, validates, placed.warnings)

    def _require_names(self, placed: PlacedModel) -> None:
        present = {name for name, _ in placed.model.named_parameters()}
        if gone := next((name for name in placed.names if name not in present), None):
            raise UsageError(
                f"the model has lost its parameter {gone!r} since run.model(), as when weights are tied later; tie weights and remove "
                "layers before run.model()"
            )

    def free(self) -> None:
        """Free the model, the optimizer and the dataset. The next group makes new ones, and there may not be memory for both."""
        if self._placed:
            self._placed.remove()
        if self._samples:
            self._samples.free()
        self._placed = self._rates = self._given = self._samples = None


_FUNCTIONS = {
    "validate": "a function that returns the mean loss of a batch; give the data themselves to run.dataset(..., validation=...), or set "
    "data.validation",
    "after_step": "a function of the script",
}


def require_functions(**given: object) -> None:
    """Check that what a script gives to `run.steps` can be called.

    Raises:
        UsageError: Something cannot.
    """
    for name, function in given.items():
        if function is not None and not callable(function):
            kind = type(function).__name__
            raise UsageError(f"run.steps({name}=...) got an object of type {kind}, and needs {_FUNCTIONS[name]}")
