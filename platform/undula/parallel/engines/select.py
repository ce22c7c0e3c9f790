"""Selection of the engine that trains a module."""

from collections.abc import Callable
from functools import partial
from typing import assert_never

import torch
from torch import nn

from undula.errors import UsageError
from undula.parallel.capabilities import EngineKind, engine_with, features_of, refusal
from undula.parallel.collectives import AllReduce, all_reduce_over
from undula.parallel.engines.engine import Engine
from undula.parallel.layout import Layout
from undula.parallel.parameters import features_of_model
from undula.parallel.reduce.adasum import AdasumAccumulator
from undula.parallel.reduce.buckets import BucketAccumulator
from undula.parallel.reduce.exact import ExactAccumulator
from undula.parallel.spec import Compression, EngineName, EngineSettings

MakeEngine = Callable[[nn.Module, Layout], Engine]
"""Function that makes the engine of a module."""


def make_engine(module: nn.Module, layout: Layout, settings: EngineSettings) -> Engine:
    """Make the engine that trains a module with a job's settings.

    Raises:
        UsageError: No engine supports these settings with this module. Preflight finds most of these cases before any worker starts.
    """
    required = features_of(settings)
    features = required | features_of_model(module)
    if problem := refusal(features):
        raise UsageError(problem)
    capabilities = engine_with(features)
    engine = _engine_of(capabilities.name, layout, settings)
    engine.capabilities, engine.settings, engine.gradient = capabilities, required, settings.gradient
    return engine


def _engine_of(kind: EngineKind, layout: Layout, settings: EngineSettings) -> Engine:
    compression = sent_as(settings.gradient.compression)
    match kind:
        case "fsdp":
            from undula.parallel.engines.fsdp import FSDPEngine

            return FSDPEngine(layout)
        case "exact":
            return Engine(layout, partial(ExactAccumulator, all_reduce=_all_reduce(layout, settings.engine)))
        case "adasum":
            all_reduce = _all_reduce(layout, settings.engine)
            return Engine(
                layout,
                partial(
                    AdasumAccumulator, layout=layout, virtual_workers=settings.virtual_workers, all_reduce=all_reduce
                ),
            )
        case "horovod":
            from undula.parallel.reduce.horovod import HorovodAccumulator

            return Engine(layout, partial(HorovodAccumulator, sent_as=compression))
        case "data parallel":
            if layout.num_cells == 1:
                return Engine(layout)
            return Engine(layout, partial(BucketAccumulator, layout=layout, sent_as=compression))
        case _:
            assert_never(kind)


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
    """Return the function with which an accumulator that sends its results by itself sums a tensor over the ranks."""
    match engine:
        case "torch":
            return all_reduce_over(layout.shards)
        case "horovod":
            from undula.parallel.reduce.horovod import sum_over_horovod

            return sum_over_horovod
        case _:
            assert_never(engine)
