"""Preparation of the script's model: its engine, what is compiled, the activations that it keeps, and its precision."""

import sys
from collections.abc import Callable
from weakref import WeakSet

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from undula.errors import UsageError
from undula.parallel.activations import keep_activations
from undula.parallel.batch_norm import replace_sync_batch_norm
from undula.parallel.compile import compile_forward, watch_compilation
from undula.parallel.engines.engine import Engine
from undula.parallel.engines.select import make_engine
from undula.parallel.layout import Layout
from undula.parallel.precision import dtype_of
from undula.parallel.spec import EngineSettings
from undula.plan.plan import Plan
from undula.recovery.progress import Progress
from undula.state.events import WarningEvent
from undula.train.job import Job

_WRAPPERS = (DataParallel, DistributedDataParallel)
"""Modules of torch that divide batches or reduce gradients, as the run does."""


def engine_of(job: Job, module: nn.Module, layout: Layout) -> Engine:
    """Return the engine that trains a module with a job's settings."""
    settings = EngineSettings(
        job.plan.virtual_workers,
        job.engine,
        job.deterministic,
        job.gradient,
        measures_noise=job.noise_every_steps > 0,
        compute=job.precision.compute,
    )
    return make_engine(module, layout, settings)


def prepare_module(module: nn.Module) -> tuple[WarningEvent, ...]:
    """Give a module's SyncBatchNorms the statistics of virtual workers, before the module has an engine.

    Returns:
        Warnings for the run's records.

    Raises:
        UsageError: A parameter has no shape yet, or a layer is of a subclass of SyncBatchNorm.
    """
    if lazy := [name for name, each in module.named_parameters() if isinstance(each, nn.UninitializedParameter)]:
        raise UsageError(
            f"run.model() got a module whose parameter {lazy[0]!r} has no shape yet; run a batch through the module first"
        )
    replaced = replace_sync_batch_norm(module)
    return (WarningEvent("sync_batch_norm", ", ".join(replaced) or "the model itself"),) if replaced else ()


def place_model(module: nn.Module, engine: Engine, job: Job, plan: Plan) -> tuple[nn.Module, Callable[[], None]]:
    """Place a module on its device, and change its forward passes as a job's settings say.

    Returns:
        The module that the script calls, and a function that undoes the changes. Without it, the module can stay in memory although
        nothing uses it.

    Raises:
        UsageError: The module is, or contains, one that divides batches or reduces gradients as well.
    """
    for each in module.modules():
        if isinstance(each, _WRAPPERS):
            raise UsageError(
                f"run.model() got a {type(each).__name__} module; pass the module that it wraps, because the run divides the samples and "
                "reduces the gradients"
            )
    model = engine.place(module)
    # Training and validation have graphs of their own; a micro-batch without samples and one of a validation may have other sizes.
    forget_compiled = compile_forward(module, job.activations, 4 * (len(plan.sizes()) + 1)) if job.compile else None
    keep_all = keep_activations(module, job.activations)
    if dtype := dtype_of(job.precision.compute):
        engine.compute_in(dtype)
    wrapping = register_module_module_registration_hook(_refuse_wrapping(WeakSet(module.modules())))

    def undo() -> None:
        wrapping.remove()
        keep_all()
        if forget_compiled:
            forget_compiled()

    return model, undo


def _refuse_wrapping(modules: WeakSet[nn.Module]) -> Callable[[nn.Module, str, nn.Module | None], None]:
    """Return a hook that refuses a wrapper around one of the modules, when the wrapper is made."""

    def refuse(owner: nn.Module, name: str, module: nn.Module | None) -> None:
        if isinstance(owner, _WRAPPERS) and module in modules:
            raise UsageError(
                f"{type(owner).__name__}(model) was called with the model of the run, which divides the samples and reduces the gradients "
                "itself; use the model as run.model() returns it"
            )

    return refuse


def watch_compilation_of(progress: Progress) -> Callable[[], None] | None:
    """Record in a rank's progress when torch compiles, also what the script itself lets it compile; return a function that ends this."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled then, and its import takes seconds
        return None
    return watch_compilation(progress.begin_compiling, progress.end_compiling)
