"""Preparation of the script's model: its engine, what is compiled, the activations that it keeps, and its precision."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from undula.errors import UsageError
from undula.parallel.activations import keep_activations
from undula.parallel.batch_norm import replace_sync_batch_norm
from undula.parallel.compile import compile_forward, watch_compilation
from undula.parallel.engines.engine import Engine
from undula.parallel.engines.select import MakeEngine
from undula.parallel.layout import Layout
from undula.parallel.materialize import is_on_meta
from undula.parallel.precision import cpu_problem, dtype_of
from undula.plan.plan import Plan
from undula.recovery.progress import Progress
from undula.state.events import WarningEvent
from undula.state.model_state import keep_names
from undula.state.pieces import is_sharded, is_sharded_tensor
from undula.train.job import Job

_WRAPPERS = (DataParallel, DistributedDataParallel)
"""Modules of torch that divide batches or reduce gradients, as the run does."""


@dataclass(frozen=True)
class PlacedModel:
    """A module that a run can train."""

    model: nn.Module
    """Module that the script calls."""
    engine: Engine
    warnings: tuple[WarningEvent, ...]
    """Warnings for the run's records."""
    names: tuple[str, ...]
    """Names of the parameters."""
    undo: tuple[Callable[[], None], ...]
    """Functions that undo the changes of the module. Without them, it can stay in memory although nothing uses it."""

    def remove(self) -> None:
        """Undo the changes of the module."""
        self.engine.close()
        for undo in self.undo:
            undo()


def place_model(module: nn.Module, job: Job, plan: Plan, layout: Layout, make_engine: MakeEngine) -> PlacedModel:
    """Place a module on its device, and change its forward passes as a job's settings say.

    Raises:
        UsageError: A parameter has no shape yet, a buffer is sparse, a layer is of a subclass of SyncBatchNorm, the module is, or contains,
            one that divides batches or reduces gradients as well, no engine can train it with these settings, or not on this device.
    """
    if layout.device.type == "cpu" and (problem := cpu_problem(job.precision.compute)):
        raise UsageError(problem)
    _check_module(module, bool(job.sharding.stage) or is_sharded(module))
    _give_memory_to_buffers(module)
    keep_names(module)
    replaced = replace_sync_batch_norm(module)
    warnings = (WarningEvent("sync_batch_norm", ", ".join(replaced) or "the model itself"),) if replaced else ()
    undo: list[Callable[[], None]] = []
    # The order matters. The engine shards or copies the parameters first, because that can replace them. Units are compiled before their
    # forward passes are replaced by recomputed ones, which then run the compiled code again. 16 bits apply to all of it.
    engine = make_engine(module, layout)
    model = engine.place(module)
    if job.compile:
        # Training and validation have graphs of their own; a micro-batch without samples and one of a validation may have other sizes.
        undo.append(compile_forward(module, job.activations, graphs=4 * (len(plan.sizes()) + 1)))
    undo.append(keep_activations(module, job.activations))
    if dtype := dtype_of(job.precision.compute):
        engine.compute_in(dtype)
    undo.append(register_module_module_registration_hook(_refuse_wrapping(WeakSet(module.modules()))).remove)
    names = tuple(name for name, _ in model.named_parameters())
    return PlacedModel(model, engine, warnings, names, tuple(reversed(undo)))


def problem_of_lazy_parameters(module: nn.Module) -> str | None:
    """Return why a module with parameters that have no shape yet cannot be the model of a run; None if it has none."""
    lazy = [name for name, each in module.named_parameters() if isinstance(each, nn.UninitializedParameter)]
    if not lazy:
        return None
    return (
        f"run.model() got a module whose parameter {lazy[0]!r} has no shape yet; run a batch through the module first"
    )


def _check_module(module: nn.Module, is_sharded: bool) -> None:
    if problem := problem_of_lazy_parameters(module):
        raise UsageError(problem)
    if not is_sharded and is_on_meta(module):
        raise UsageError(
            "run.model() got a module on the meta device, whose weights have no values; make it on the CPU, or set sharding.stage, with "
            "which each of its units is drawn with reset_parameters()"
        )
    if wrapper := next((part for part in module.modules() if isinstance(part, _WRAPPERS)), None):
        raise UsageError(
            f"run.model() got a {type(wrapper).__name__} module; pass the module that it wraps, because the run divides the samples and "
            "reduces the gradients"
        )


def _give_memory_to_buffers(module: nn.Module) -> None:
    """Copy buffers that cannot be written to, since elements share their memory or are stored as conjugates or negatives.

    Raises:
        UsageError: A buffer is sparse.
    """
    for path, layer in module.named_modules():
        for key, buffer in [*layer.named_buffers(recurse=False, remove_duplicate=False)]:
            if buffer.is_meta or is_sharded_tensor(buffer):
                continue
            if buffer.layout is not torch.strided:
                name, layout = f"{path}.{key}".removeprefix("."), str(buffer.layout).removeprefix("torch.")
                raise UsageError(
                    f"the buffer {name!r} is a {layout} tensor, which cannot be summed up over workers; register its indices and its "
                    "values as buffers, and make the sparse tensor in forward()"
                )
            is_shared = any(
                stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
            )
            if is_shared or buffer.is_conj() or buffer.is_neg():
                setattr(layer, key, buffer.resolve_conj().resolve_neg().contiguous())


def _refuse_wrapping(modules: WeakSet[nn.Module]) -> Callable[[nn.Module, str, nn.Module | None], None]:
    """Return a hook that refuses a wrapper around one of the modules, when the wrapper is made."""

    def refuse(owner: nn.Module, name: str, module: nn.Module | None) -> None:
        if isinstance(owner, _WRAPPERS) and module in modules:
            raise UsageError(
                f"{type(owner).__name__}(model) was called with the model of the run, which divides the samples and reduces the gradients "
                "itself; use the model as run.model() returns it"
            )

    return refuse


def watch_compilation_of(progress: Progress) -> Callable[[], None]:
    """Record in a rank's progress when torch compiles, also what the script itself lets it compile; return a function that ends this."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled then, and its import takes seconds
        return lambda: None
    return watch_compilation(progress.begin_compiling, progress.end_compiling)
