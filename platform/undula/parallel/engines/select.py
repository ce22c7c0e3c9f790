"""Selection of the engine that trains a module."""

from collections.abc import Callable
from typing import assert_never

import torch
from torch import nn

from undula.errors import UsageError
from undula.parallel.capabilities import Capabilities, engine_with, features_of, refusal
from undula.parallel.collectives import AllReduce, all_reduce_over
from undula.parallel.engines.adasum import AdasumEngine
from undula.parallel.engines.data_parallel import DataParallelEngine
from undula.parallel.engines.engine import Engine, features_of_model
from undula.parallel.engines.exact import ExactEngine
from undula.parallel.layout import Layout
from undula.parallel.spec import Compression, EngineName, GradientSpec
from undula.plan.precision import Compute

MakeEngine = Callable[[nn.Module, Layout], Engine]
"""Function that makes the engine of a module."""


def make_engine(
    module: nn.Module,
    layout: Layout,
    engine: EngineName,
    deterministic: bool,
    gradient: GradientSpec,
    measures_noise: bool,
    virtual_workers: int,
    compute: Compute = "fp32",
) -> Engine:
    """Make the engine that trains a module with a job's settings.

    Raises:
        UsageError: No engine supports these settings with this module. Preflight finds most of these cases before any worker starts.
    """
    settings = features_of(engine, deterministic, gradient, measures_noise, compute)
    features = settings | features_of_model(module)
    if problem := refusal(features):
        raise UsageError(problem)
    made = _made(engine_with(features), layout, engine, gradient, virtual_workers)
    made.settings = settings
    return made


def _made(
    capabilities: Capabilities, layout: Layout, engine: EngineName, gradient: GradientSpec, virtual_workers: int
) -> Engine:
    chosen = capabilities.name
    match chosen:
        case "fsdp":
            from undula.parallel.engines.fsdp import FSDPEngine

            return FSDPEngine(layout)
        case "exact":
            return ExactEngine(layout, _all_reduce(layout, engine))
        case "adasum":
            return AdasumEngine(layout, virtual_workers, _all_reduce(layout, engine))
        case "horovod":
            from undula.parallel.engines.horovod import HorovodEngine

            return HorovodEngine(layout, sent_as(gradient.compression))
        case "data parallel":
            return DataParallelEngine(layout, sent_as(gradient.compression))
        case _:
            assert_never(chosen)


def sent_as(compression: Compression) -> torch.dtype | None:
    """Return the dtype in which gradients are sent; None for their own dtype."""
    match compression:
        case "none":
            return None
        case "fp16":
            return torch.float16
        case _:
            assert_never(compression)


def _all_reduce(layout: Layout, engine: EngineName) -> AllReduce:
    """Return the function with which an engine that sends its gradients by itself sums a tensor over the ranks."""
    match engine:
        case "torch":
            return all_reduce_over(layout.shards)
        case "horovod":
            from undula.parallel.engines.horovod import sum_over_horovod

            return sum_over_horovod
        case _:
            assert_never(engine)
