"""Facts about a script's model, which the driver determines before any worker starts.

The train function runs on torch's meta device for this, so that no memory is allocated for the weights.
"""

import io
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from undula.config.job import LoadedSpec
from undula.parallel.capabilities import Feature
from undula.parallel.compile import problem_of_compilation
from undula.parallel.engines.select import features_of_model
from undula.parallel.units import problem_of_units
from undula.plan.plan import Plan
from undula.state.model_state import Shapes, model_shapes
from undula.train.run import Run
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


def model_facts(train: Callable[[Run], None], loaded: LoadedSpec, plan: Plan) -> ModelFacts | None:
    """Run a train function on the meta device up to `run.model(...)`, and inspect the module that it passes.

    Args:
        train: Train function of the script.
        loaded: The job.
        plan: The job's plan.

    Returns:
        The facts; None if the train function ends before it calls `run.model(...)`. The workers check the model again.
    """
    probe = _ModelProbe(loaded, plan)
    try:
        with _world(), torch.device("meta"), redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(probe)  # type: ignore[arg-type]
    except _ModelBuiltError as built:
        return built.facts
    except (Exception, SystemExit):
        # If the script itself is wrong, the workers report it with a traceback. It may also need a GPU, which the head does not have.
        return None
    return None


class _ModelBuiltError(Exception):
    """Ends the train function as soon as it passes a model to the run."""

    def __init__(self, facts: ModelFacts):
        self.facts = facts


class _ModelProbe:
    """Stand-in for a Run until the script passes its model."""

    def __init__(self, loaded: LoadedSpec, plan: Plan):
        self.config = loaded.config
        self._spec = loaded.spec
        self.base_lr = loaded.spec.schedule.base_lr
        self.plan = plan
        self.rank, self.world_size, self.device = 0, 1, torch.device("meta")

    def map(self, *functions: object, **more: object) -> None:
        """Do nothing, because the shapes of a model do not depend on the samples."""

    def model(self, module: nn.Module) -> nn.Module:
        activations, problem = self._spec.activations, None
        if not activations.is_default:
            problem = problem_of_units(module, activations.units)
        if self._spec.compile and problem is None:
            problem = problem_of_compilation(module)
        raise _ModelBuiltError(ModelFacts(model_shapes(module), frozenset(features_of_model(module)), problem))


def _world() -> AbstractContextManager[None]:
    """Return a context with a process group, which `fully_shard` requires: the existing one, or else one of this process alone."""
    return nullcontext() if dist.is_initialized() else local_world(torch.device("cpu"))
