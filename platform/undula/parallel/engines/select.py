"""Selection of the engine that trains a module."""

from collections.abc import Callable
from functools import partial
from typing import assert_never

import torch
from torch import nn

from undula.errors import UsageError
from undula.parallel.capabilities import EngineKind, engine_with, features_of, refusal
from undula.parallel.collectives import AllRows, all_rows
from undula.parallel.engines.engine import Engine
from undula.parallel.engines.library import library_named
from undula.parallel.layout import Layout
from undula.parallel.reduce.accumulator import features_of_model
from undula.parallel.reduce.adasum import AdasumAccumulator
from undula.parallel.reduce.exchange import Exchange, TorchExchange
from undula.parallel.reduce.tree import TreeAccumulator
from undula.parallel.spec import Compression, EngineSettings

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
    virtual_workers, compression = settings.virtual_workers, sent_as(settings.gradient.compression)
    match kind:
        case "sharded":
            from undula.parallel.engines.sharded import ShardedEngine

            return ShardedEngine(layout, settings, compression)
        case "adasum":
            rows = _all_rows(layout, settings.engine)
            return Engine(
                layout, partial(AdasumAccumulator, layout=layout, virtual_workers=virtual_workers, all_rows=rows)
            )
        case "data parallel":
            if virtual_workers == 1 and compression is None:
                return Engine(layout)  # there is nothing to add up
            exchange = partial(_exchange, layout, settings) if layout.num_cells > 1 else None
            tree = partial(TreeAccumulator, layout=layout, virtual_workers=virtual_workers, sent_as=compression)
            return Engine(layout, partial(tree, make_exchange=exchange))
        case _:
            assert_never(kind)


def sent_as(compression: Compression) -> torch.dtype | None:
    """Return the dtype in which gradients are sent; None for their own dtype."""
    match compression:
        case "none":
            return None
        case "fp16":
            return torch.float16
        case "bf16":
            return torch.bfloat16
        case _:
            assert_never(compression)


def _exchange(layout: Layout, settings: EngineSettings) -> Exchange:
    library = library_named(settings.engine)
    make = library.exchange if library else TorchExchange
    return make(layout, settings.virtual_workers)


def _all_rows(layout: Layout, engine: str) -> AllRows:
    library = library_named(engine)
    return library.all_rows(layout) if library else partial(all_rows, layout.shards)
