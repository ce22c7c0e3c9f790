"""Steps of an engine on the virtual workers of a rank, for tests of engines without a run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from undula.parallel.engines.engine import Engine
from undula.parallel.engines.select import make_engine
from undula.parallel.layout import join_layout
from undula.parallel.spec import EngineSettings, GradientSpec
from undula.plan.plan import MicroBatch

FP16 = GradientSpec(compression="fp16")
ADASUM = GradientSpec(reduce="adasum")


def placed(module: nn.Module, rank: int, world_size: int, virtual_workers: int, **settings: Any) -> Engine:
    """Return the engine of some settings with a module on the CPU of this rank."""
    engine_settings = EngineSettings(virtual_workers, **settings)
    layout = join_layout(rank, world_size, torch.device("cpu"))
    layout = replace(layout, interleaves=engine_settings.sharding.interleaves)
    engine = make_engine(module, layout, engine_settings)
    engine.place(module)
    return engine


def step_gradients(engine: Engine, samples: Sequence[int], loss_of: Callable[[int], Tensor]) -> list[list[Any] | None]:
    """Run a step, and return the gradient of each parameter. The arguments are those of `run_backward`."""
    run_backward(engine, samples, loss_of)
    gradients = [parameter.grad for parameter in engine.parameters]
    engine.free_gradients()
    return [None if gradient is None else gradient.to_dense().flatten().tolist() for gradient in gradients]


def run_backward(
    engine: Engine, samples: Sequence[int], loss_of: Callable[[int], Tensor], max_norm: float | None = None
) -> None:
    """Leave the gradients of a step in the parameters.

    Args:
        engine: Engine with a module.
        samples: Number of samples of each virtual worker.
        loss_of: Function that returns the mean loss of a virtual worker.
        max_norm: Norm to which a larger gradient is clipped; None for none.
    """
    layout = engine.layout
    own = layout.virtual_workers(len(samples))
    work = [place for place in own if samples[place]] or list(own[:1])
    micro_batches = [MicroBatch(0, place, 0, samples[place]) for place in work]
    engine.begin_step(micro_batches)
    for micro_batch in micro_batches:
        is_last = micro_batch is micro_batches[-1]
        engine.before_forward(is_last)
        weight = micro_batch.samples / sum(samples)
        engine.backward(loss_of(micro_batch.virtual_worker), weight, micro_batch, is_last)
    engine.finish_gradients(sum(samples), max_norm=max_norm)
