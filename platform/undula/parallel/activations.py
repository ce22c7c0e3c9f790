"""Activations that a model keeps for the backward pass. It recomputes the others from them, or keeps them in host memory.

The forward pass of each unit is replaced by one that frees its activations. The modules and their names stay as they are, so that
checkpoints fit whatever a job keeps.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from undula.errors import UsageError
from undula.parallel.host_memory import InHostMemory
from undula.parallel.recompute import Context, MakeContexts, Segment, no_contexts
from undula.parallel.replaced import Replacement, call_all, replace_forward
from undula.parallel.selective import keeping_expensive
from undula.parallel.spec import ActivationsSpec
from undula.parallel.units import problem_of_units, units_of
from undula.state.pieces import is_sharded


def keep_activations(module: nn.Module, spec: ActivationsSpec, has_hooks: bool | None = None) -> Callable[[], None]:
    """Let a module keep the activations that a job's settings name.

    Args:
        module: The module.
        spec: Settings of the job.
        has_hooks: Whether units have hooks that gather their parameters; by default whether the module is sharded.

    Returns:
        Function that undoes this. Without it, the module can stay in memory although nothing uses it.

    Raises:
        UsageError: The settings name units that the module does not have.
    """
    if spec.is_default:
        return _nothing
    if problem := problem_of_units(module, spec.units):
        raise UsageError(problem)
    units = list(units_of(module, spec.units).values())
    make = (
        _Offloaded if spec.keep == "all" else partial(_Recomputed, chain=_Chain(spec, len(units)), has_hooks=has_hooks)
    )
    return partial(call_all, [replace_forward(unit, make(unit)) for unit in units])


def _nothing() -> None:
    """Do nothing, because nothing was replaced."""


class _Offloaded(Replacement):
    """Forward pass of a unit whose activations wait in host memory for the backward pass."""

    def __init__(self, unit: nn.Module):
        super().__init__(unit)
        self._unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with InHostMemory(self._unit):
            return self.replaced(*args, **kwargs)


class _Recomputed(Replacement):
    """Forward pass of a unit that the backward pass repeats."""

    def __init__(self, unit: nn.Module, chain: "_Chain", has_hooks: bool | None):
        super().__init__(unit)
        self._unit = unit
        self._chain = chain
        has_hooks = is_sharded(unit) if has_hooks is None else has_hooks
        # In the backward pass, a sharded unit other than the current one must gather its parameters, which its hooks do.
        self._again = self._call if has_hooks and chain.size > 1 else self.replaced
        self._is_repeated = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_repeated, self._is_repeated = self._is_repeated, False
        if is_repeated or not torch.is_grad_enabled():
            return self.replaced(*args, **kwargs)
        segment = self._chain.segment_for(args, kwargs)
        return segment.run(self.replaced, self._again, self._unit, self._chain.contexts, args, kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._is_repeated = True
        return self._unit(*args, **kwargs)


class _Chain:
    """Division of a model's calls of units into segments.

    Args:
        spec: Settings of the job.
        units: Number of units.
    """

    def __init__(self, spec: ActivationsSpec, units: int):
        self.size = spec.segment(units)
        self.contexts: MakeContexts = keeping_expensive if spec.keep == "selective" else no_contexts
        self._saving: Callable[[], Context] = InHostMemory if spec.offload else _in_place
        self._last: weakref.ref[Segment] | None = None

    def segment_for(self, args: Any, kwargs: Any) -> Segment:
        """Return the segment to which a call belongs."""
        last = self._last() if self._last else None
        if last is None or not last.continues_with(args, kwargs):
            last = Segment(self.size, self._saving)
            self._last = weakref.ref(last)
        return last


def _in_place() -> Context:
    return no_contexts()[0]
