"""Facts about a script's dataset and model, which the driver determines before any worker starts.

The train function runs on torch's meta device for this, so that no memory is allocated for the weights. A dataset of the script is made
before, on the CPU.
"""

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from undula.config.job import LoadedSpec
from undula.data.script.indexed import ScriptData
from undula.data.script.items import Items
from undula.errors import SpecError, StoppedExit, UndulaError, UsageError
from undula.parallel.batch_norm import problem_of_batch_norm
from undula.parallel.capabilities import Feature
from undula.parallel.compile import problem_of_compilation
from undula.parallel.reduce.accumulator import features_of_model
from undula.parallel.sharding import problem_of_sharding
from undula.parallel.units import problem_of_units
from undula.plan.plan import Plan
from undula.state.model_state import Shapes, keep_names, model_shapes
from undula.state.pieces import is_sharded
from undula.train.job import Job
from undula.train.launched_habits import refusal_of
from undula.train.model import problem_of_lazy_parameters
from undula.train.run import Run
from undula.train.script_source import code_of, refuse_number_of_workers_in_loops
from undula.train.session import Check, Kept, Maps
from undula.train.single_process import local_world


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that preflight needs before a worker builds it."""

    shapes: Shapes
    """Shapes of the parameters and buffers, by their names in the state of the run."""
    features: frozenset[Feature]
    """Features that the model requires of an engine."""
    problem: str | None = None
    """Reason why settings of the job do not fit the model, as a sentence; None if they fit."""


@dataclass(frozen=True)
class ScriptFacts:
    """Facts about a script."""

    data: ScriptData | None
    """Data that the script gives to the run; None if the job's YAML names the data."""
    model: ModelFacts | None
    """Facts about the model; None if the train function ended before `run.model(...)`. The workers check the model again."""


def script_facts(train: Callable[[Run], None], loaded: LoadedSpec, num_rows: int | None) -> ScriptFacts:
    """Run a train function up to `run.model(...)`, and inspect the dataset and the module that it passes.

    Args:
        train: Train function of the script.
        loaded: The job.
        num_rows: Number of rows of the training data; None if the script gives them.

    Raises:
        UndulaError: The run cannot use the dataset or something else in the script, or the script gives no dataset although the job's YAML
            names no data.
    """
    with (
        _world(),
        _without_breakpoints(),
        redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
        ExitStack() as stack,
    ):
        warnings.simplefilter("ignore")
        probe = _Probe(loaded, num_rows, stack)
        try:
            refuse_number_of_workers_in_loops(code_of(train), "run.virtual_workers")
            train(Run(probe))
        except _ModelBuiltError as built:
            return ScriptFacts(probe.data, built.facts)
        except UsageError as error:
            # The probe has raised it, or an adapter, which refuses what it finds in the script.
            raise probe.refusal or error from None
        except StoppedExit:
            raise
        except (Exception, SystemExit) as error:
            # If the script itself is wrong, the workers report it with a traceback. It may also need a GPU, which the head does not have.
            if refusal := probe.refusal or refusal_of(error):
                raise refusal from None
            probe.require_data(error)
            logging.getLogger("undula").warning(
                "the model is not checked before workers start, because the script failed with %s before run.model(): %s",
                type(error).__name__,
                " ".join(str(error).split()),
            )
        else:
            probe.require_data(None)
        return ScriptFacts(probe.data, None)


@contextmanager
def _without_breakpoints() -> Iterator[None]:
    """Let `breakpoint()` do nothing, because the script runs once more to train."""
    hook = sys.breakpointhook
    sys.breakpointhook = lambda *_, **__: None
    try:
        yield
    finally:
        sys.breakpointhook = hook


class _ModelBuiltError(Exception):
    """Ends the train function as soon as it passes a model to the run."""

    def __init__(self, facts: ModelFacts):
        self.facts = facts


class _Probe:
    """Session of a run that ends as soon as the script passes its model. It takes no part in a worker group, and stores nothing.

    Args:
        loaded: The job.
        num_rows: Number of rows of the training data; None if the script gives them.
        stack: Stack of contexts that end with the script.
    """

    rank, world_size, device = 0, 1, torch.device("meta")

    def __init__(self, loaded: LoadedSpec, num_rows: int | None, stack: ExitStack):
        self.job = Job.of(loaded.spec, run_url=loaded.spec.run_url, config=loaded.config)
        self._loaded, self._stack = loaded, stack
        self.data: ScriptData | None = None
        self.refusal: UndulaError | None = None
        """Error for what the script passed; the script may have caught it."""
        self._plan: Plan | None = None
        self._kept: dict[str, Any] = {}
        if num_rows is not None:
            self._plan = Plan(self.job.plan, num_rows)
            self._enter_meta_device()

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            self.refusal = UsageError(
                "run.plan was read before run.dataset(), which makes it; call run.dataset() first"
            )
            raise self.refusal
        return self._plan

    def keep(self, name: str, make: Callable[[], Kept], close: Callable[[Kept], None] | None) -> Kept:
        if name not in self._kept:
            self._kept[name] = made = make()
            if close is not None:
                self._stack.callback(close, made)
        return self._kept[name]  # type: ignore[no-any-return]

    def alive(self) -> None:
        """Do nothing, because the driver waits for the script."""

    def gather(self, value: object) -> list[Any]:
        return [value]

    def samples_of(self, data: ScriptData, training: Items, validation: Items | None) -> None:
        """Record the length and the identity of the data."""
        try:
            if not self.job.data.is_of_script:
                key = "data.mix" if self.job.data.mix else "data.train"
                raise UsageError(
                    f"run.dataset() was called, but {self._loaded.origin(key)} has {key}; remove {key}, or the call of run.dataset()"
                )
            data.training.check_plan(self.job.plan)
            self._plan = Plan(self.job.plan, data.training.num_rows)
        except UndulaError as error:
            self.refusal = error
            raise
        self.data = data
        self._enter_meta_device()

    def preflight(self, check: Check) -> None:
        check(self._loaded.origins.keys())

    def place(self, module: nn.Module) -> NoReturn:
        """End the script with the facts about its model."""
        self.require_data(None)
        if lazy := problem_of_lazy_parameters(module):
            self.refusal = UsageError(lazy)
            raise self.refusal
        activations, problem = self.job.activations, None
        if not activations.is_default:
            problem = problem_of_units(module, activations.units)
        if self.job.compile and problem is None:
            problem = problem_of_compilation(module)
        if self.job.sharding.stage and problem is None and not is_sharded(module):
            problem = problem_of_sharding(module, self.job.sharding)
        problem = problem or problem_of_batch_norm(module)
        keep_names(module)
        raise _ModelBuiltError(ModelFacts(model_shapes(module), frozenset(features_of_model(module)), problem))

    def stored_samples(self, maps: Maps) -> NoReturn:
        raise AssertionError("`place` ends the script")

    def loop(self, parts: Any, validate: Any, after_step: Any) -> NoReturn:
        raise AssertionError("`place` ends the script")

    def _enter_meta_device(self) -> None:
        """From now on, tensors are made without memory."""
        self._stack.enter_context(torch.device("meta"))

    def require_data(self, error: BaseException | None) -> None:
        """Check that the data are known.

        Args:
            error: Error with which the script ended; None if it did not end with one.

        Raises:
            SpecError: They are not.
        """
        if self._plan is not None:
            return
        if error is not None:
            fix = "make the dataset readable on this machine"
            if isinstance(error, SystemExit):
                fix = "if it has a command line of its own, move its arguments to the section config of the YAML"
            self.refusal = SpecError(
                f"the script failed with {type(error).__name__}: {' '.join(str(error).split())} before run.dataset(), to which the driver "
                f"runs it for the number of samples; {fix}{_instead_of_lightnings_fit()}"
            )
        else:
            self.refusal = SpecError(
                "data.train and data.mix are missing, and the script does not call run.dataset() before run.model(); set data.train, or "
                f"call run.dataset(){_instead_of_lightnings_fit()}"
            )
        raise self.refusal from error


def _instead_of_lightnings_fit() -> str:
    """Return what a script with Lightning must call, as the end of a message; nothing if the script does not use Lightning."""
    if not {"pytorch_lightning", "lightning.pytorch"} & sys.modules.keys():
        return ""
    return (
        ", or call undula.adapters.lightning.fit(run, module, datamodule) in place of the fit() of Lightning's Trainer"
    )


def _world() -> AbstractContextManager[None]:
    """Return a context with a process group, which `fully_shard` requires: the existing one, or else one of this process alone."""
    return nullcontext() if dist.is_initialized() else local_world(torch.device("cpu"))
