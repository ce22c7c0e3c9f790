"""Compilation of a model with torch.compile, one graph for each shape of micro-batch, so that the bits do not depend on the ranks."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from undula.errors import UsageError
from undula.parallel.activations import Replacement, call_all, replace_forward
from undula.parallel.recompute import Forward
from undula.parallel.spec import ActivationsSpec
from undula.parallel.units import units_of
from undula.state.pieces import is_sharded

OTHER_GRAPHS = 8
"""Number of graphs beyond what a plan needs, for example after a script has frozen parameters."""


def compile_forward(module: nn.Module, activations: ActivationsSpec, graphs: int) -> Callable[[], None]:
    """Compile the forward pass of a module; if its activations are recomputed or it is sharded, compile those of its units instead.

    Args:
        module: The module.
        activations: The job's settings for activations.
        graphs: Number of graphs that the plan needs.

    Returns:
        Function that undoes this.

    Raises:
        UsageError: The module is sharded and has no units.
    """
    if problem := problem_of_compilation(module):
        raise UsageError(problem)
    is_one = activations.is_default and not is_sharded(module)
    parts = [module] if is_one else list(units_of(module, activations.units).values())
    undo = [
        _allow_graphs(graphs * len(parts) + OTHER_GRAPHS),
        *(replace_forward(part, _Compiled(part)) for part in parts),
    ]
    return partial(call_all, undo)


def problem_of_compilation(module: nn.Module) -> str | None:
    """Return the reason why a module cannot be compiled, as a sentence; None if it can be."""
    if is_sharded(module) and not units_of(module, "auto"):
        return (
            "compile=true compiles the repeated blocks of a model that fully_shard() has sharded, but this model has no two modules of one "
            "class in a ModuleList or Sequential; set compile=false"
        )
    return None


def problem_of_compiler(device: torch.device) -> str | None:
    """Return the reason why this process cannot compile models for a device, as a sentence; None if it can.

    A small function is compiled for this, because a compiler can lack headers. torch would take its result from a cache.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()  # type: ignore[no-untyped-call,unused-ignore]
        torch.compile(_small, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # whatever compilers and their callers raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return (
            f"compile=true needs a working C++ compiler, and torch cannot use one here ({reason}); install one, for example with "
            "`apt-get install g++`, or set compile=false"
        )
    return None


def compile_with_own_threads() -> None:
    """Let torch compile with as many threads as it computes with. By default, a pool has a process for each CPU of the machine."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(torch.get_num_threads()))


def watch_compilation(begin: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Call functions when torch begins and ends to compile, in whatever thread. Return a function that ends this."""
    from torch._dynamo.callback import callback_handler

    def on_begin(_arguments: Any) -> None:
        begin()

    def on_end(_arguments: Any) -> None:
        end()

    callback_handler.register_start_callback(on_begin)
    callback_handler.register_end_callback(on_end)

    def stop() -> None:
        callback_handler.remove_start_callback(on_begin)
        callback_handler.remove_end_callback(on_end)

    return stop


class _Compiled(Replacement):
    """Compiled forward pass of a module."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        from torch._dynamo.exc import FailOnRecompileLimitHit

        self._limit_hit = FailOnRecompileLimitHit
        # Otherwise, processes may choose different kernels, because they measure how fast these are.
        options: Any = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else None
        self._forward: Forward = torch.compile(self.replaced, dynamic=False, options=options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._forward(*args, **kwargs)
        except self._limit_hit as error:
            limit = torch._dynamo.config.recompile_limit
            raise UsageError(
                f"torch has compiled a part of the model too often, more than {limit} times, most likely because its forward pass reads a "
                "number that changes from step to step; make this number a tensor (TORCH_LOGS=recompiles names it), or set compile=false"
            ) from error


def _allow_graphs(count: int) -> Callable[[], None]:
    """Let torch compile a function so many times. Beyond that it would silently compute without compiling, which gives other bits."""
    import torch._dynamo

    patch: Any = torch._dynamo.config.patch(
        recompile_limit=max(count, torch._dynamo.config.recompile_limit),
        accumulated_recompile_limit=max(count, torch._dynamo.config.accumulated_recompile_limit),
        fail_on_recompile_limit_hit=True,
    )
    patch.__enter__()
    return partial(patch.__exit__, None, None, None)


def _small(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1
