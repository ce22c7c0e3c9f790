"""Facts about a script's model, learned in the driver without making its weights: the train function runs on torch's meta device."""

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from undula.config.job import LoadedSpec
from undula.plan.plan import Plan
from undula.state.pieces import is_sharded_tensor
from undula.train.run import Run


@dataclass(frozen=True)
class ModelFacts:
    """What preflight knows about a model before a worker builds it."""

    shapes: Mapping[str, tuple[int, ...]]
    """Global shapes of the parameters and buffers by name."""
    is_sharded: bool
    """Whether torch's `fully_shard` has sharded the model or a part of it."""
    has_sparse_gradients: bool
    """Whether an embedding of the model makes sparse gradients."""


def model_facts(train: Callable[[Run], None], loaded: LoadedSpec, plan: Plan) -> ModelFacts | None:
    """Run a train function on the meta device up to `run.model(...)`, and look at the module that it passes.

    Args:
        train: Train function of the script.
        loaded: The job.
        plan: The job's plan.

    Returns:
        The facts; None if the train function raises before it has a model. The workers check the model again.
    """
    probe = _ModelProbe(loaded, plan)
    try:
        with _world_of_one(), torch.device("meta"), redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(probe)  # type: ignore[arg-type]
    except _ModelBuiltError as built:
        return built.facts
    except Exception:
        # If the script itself is wrong, the workers will say so, with a traceback.
        return None
    return None


class _ModelBuiltError(Exception):
    """Leaves the train function as soon as it has a model."""

    def __init__(self, facts: ModelFacts):
        self.facts = facts


class _ModelProbe:
    """Stands in for a Run until the script has a model."""

    def __init__(self, loaded: LoadedSpec, plan: Plan):
        self.config = loaded.config
        self.base_lr = loaded.spec.schedule.base_lr
        self.plan = plan
        self.rank, self.world_size, self.device = 0, 1, torch.device("meta")

    def map(self, *functions: object, **more: object) -> None:
        """Do nothing: a model's shapes do not depend on the samples."""

    def model(self, module: nn.Module) -> nn.Module:
        raise _ModelBuiltError(
            ModelFacts(
                shapes={name: tuple(value.shape) for name, value in module.state_dict().items()},
                is_sharded=any(is_sharded_tensor(parameter) for parameter in module.parameters()),
                has_sparse_gradients=any(
                    isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse for part in module.modules()
                ),
            )
        )


@contextmanager
def _world_of_one() -> Iterator[None]:
    """A process group with this process alone: without a group, `fully_shard` raises."""
    if not dist.is_available() or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
