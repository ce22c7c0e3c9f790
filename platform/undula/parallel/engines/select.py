"""Selection of the engine that trains a module."""

from collections.abc import Callable

import torch
from torch import nn

from undula.errors import UsageError
from undula.parallel.capabilities import ADASUM, DATA_PARALLEL, EXACT, FSDP, Feature, engine_with, features_of, refusal
from undula.parallel.collectives import all_reduce_over
from undula.parallel.engines.adasum import AdasumEngine
from undula.parallel.engines.data_parallel import DataParallelEngine, sparse_parameters
from undula.parallel.engines.engine import Engine
from undula.parallel.engines.exact import ExactEngine
from undula.parallel.layout import Layout
from undula.parallel.spec import EngineName, GradientSpec
from undula.state.pieces import is_sharded_tensor

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
) -> Engine:
    """Make the engine that trains a module with a job's settings.

    Raises:
        UsageError: No engine supports these settings with this module. Preflight finds most of these cases before any worker starts.
    """
    features = features_of(engine, deterministic, gradient, measures_noise) | features_of_model(module)
    if problem := refusal(features):
        raise UsageError(problem)
    chosen = engine_with(features)
    if chosen is FSDP:
        from undula.parallel.engines.fsdp import FSDPEngine

        return FSDPEngine(layout)
    sent_as = torch.float16 if gradient.compression == "fp16" else None
    if chosen is DATA_PARALLEL:
        return DataParallelEngine(layout, sent_as)
    all_reduce = all_reduce_over(layout.shards)
    if Feature.HOROVOD in features:
        from undula.parallel.engines.horovod import HorovodEngine, sum_over_horovod

        all_reduce = sum_over_horovod
        if chosen not in (EXACT, ADASUM):
            return HorovodEngine(layout, sent_as)
    if chosen is EXACT:
        return ExactEngine(layout, all_reduce)
    return AdasumEngine(layout, virtual_workers, all_reduce)


def features_of_model(module: nn.Module) -> set[Feature]:
    """Return the features that a module requires of its engine."""
    asked = {
        Feature.SHARDED: any(is_sharded_tensor(parameter) for parameter in module.parameters()),
        Feature.SPARSE_GRADIENTS: bool(sparse_parameters(module)),
    }
    return {feature for feature, is_asked in asked.items() if is_asked}
