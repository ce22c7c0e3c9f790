"""Recomputation of a model's activations in the backward pass, in segments of consecutive units of which only the input is kept.

Like torch.utils.checkpoint without reentrant autograd, a segment replaces each tensor that autograd saves by a handle. The first handle
that the backward pass needs runs the segment's units again, from the buffers, random numbers and autocast settings of their forward
pass. Unlike torch's, a segment can span several calls, as when a script iterates over a ModuleList.

Also here: state of all random number generators of this process: those of torch, NumPy and Python.
"""

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from undula.errors import UsageError


@dataclass(frozen=True)
class RandomState:
    """State of the random number generators at one moment."""

    of_torch: Tensor
    of_cuda: list[Tensor]
    """State of each GPU's generator; empty if CUDA was not in use."""
    of_python: Any
    of_numpy: Any

    @classmethod
    def now(cls) -> "RandomState":
        is_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        of_cuda = torch.cuda.get_rng_state_all() if is_cuda else []
        return cls(torch.get_rng_state(), of_cuda, random.getstate(), np.random.get_state())

    def put_back(self) -> None:
        torch.set_rng_state(self.of_torch)
        if self.of_cuda:
            torch.cuda.set_rng_state_all(self.of_cuda)
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Put the random number generators back on exit, so that code after the block draws what it would have drawn without the block."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.put_back()


Context: TypeAlias = AbstractContextManager[Any]
MakeContexts: TypeAlias = Callable[[], tuple[Context, Context]]
"""Function that returns contexts for a unit's forward pass and for its recomputation."""
Forward: TypeAlias = Callable[..., Any]


class _Saved(torch.autograd.Function):
    """Saves tensors like an operation of the forward pass would, so that changes in place are noticed and outer hooks apply."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("nothing is computed from these tensors by way of this operation")


def _saved(tensors: Sequence[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Save tensors, and return a function that returns them."""
    if not tensors:
        return tuple
    # Before torch 2.13, the node frees its tensors with the output, even if a reference to the node is kept.
    output: Any = _Saved.apply(torch.empty(0, requires_grad=True, device="cpu"), *tensors)  # type: ignore[no-untyped-call]
    return lambda: tuple(output.grad_fn.saved_tensors)


@dataclass(frozen=True)
class _Output:
    """Place of an argument among the outputs of the call before."""

    place: int


@dataclass(frozen=True)
class _Kept:
    """Place of an argument among the tensors that its call has saved."""

    place: int


class _Handle:
    """Stand-in for a tensor that autograd has saved."""

    __slots__ = ("__weakref__", "kind")

    def __init__(self, kind: tuple[Any, ...]):
        self.kind = kind


class _RecomputedAllError(BaseException):
    """Ends a recomputation after the last tensor that the backward pass needs. A script's `except Exception` does not catch it."""


@dataclass(frozen=True)
class Call:
    """One call of a unit in a forward pass, with what it takes to repeat it."""

    again: Forward
    arguments: tuple[Any, ...]
    """Leaves of the arguments. A tensor is replaced by its place."""
    structure: TreeSpec
    kept: Callable[[], tuple[Tensor, ...]]
    """Function that returns the tensors that the call has saved."""
    random_state: RandomState
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    buffers: tuple[tuple[dict[str, Tensor | None], str, Tensor | None], ...]
    """Copies of the unit's buffers from before the call, with their places."""
    context: Context
    """Context of the recomputation."""

    def repeat(self, outputs: Sequence[Tensor]) -> Any:
        """Run the unit again.

        Args:
            outputs: Outputs of the call before, recomputed.
        """
        kept = self.kept()
        leaves = [
            outputs[argument.place]
            if isinstance(argument, _Output)
            else kept[argument.place]
            if isinstance(argument, _Kept)
            else argument
            for argument in self.arguments
        ]
        args, kwargs = tree_unflatten(leaves, self.structure)
        self.random_state.put_back()
        with ExitStack() as stack:
            stack.enter_context(_with_buffers(self.buffers))
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, self.autocast_cache))
            stack.enter_context(self.context)
            return self.again(*args, **kwargs)


class Segment:
    """Consecutive calls of units that are recomputed together.

    Args:
        size: Maximum number of calls.
        saving: Function that returns the context in which the inputs are saved.
    """

    def __init__(self, size: int, saving: Callable[[], Context]):
        self._size = size
        self._saving = saving
        self._calls: list[Call] = []
        self._handles: list[weakref.ref[_Handle]] = []
        self._outputs: list[tuple[weakref.ref[Tensor], int]] = []
        """Outputs of the last call, with the versions in which it has returned them."""
        self._recomputed: weakref.WeakKeyDictionary[_Handle, Tensor] = weakref.WeakKeyDictionary()
        self._position = 0

    def continues_with(self, args: Any, kwargs: Any) -> bool:
        """Return whether a call with these arguments uses the outputs of the last call, unchanged, and belongs to this segment."""
        if len(self._calls) == self._size:
            return False
        places = [self._place_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return any(place is not None for place in places)

    def run(
        self, forward: Forward, again: Forward, module: nn.Module, contexts: MakeContexts, args: Any, kwargs: Any
    ) -> Any:
        """Run a unit as the next call of this segment.

        Args:
            forward: Forward pass of the unit.
            again: Function that runs it again.
            module: The unit.
            contexts: Function that returns contexts for the forward pass and for its recomputation.
            args, kwargs: Arguments of the forward pass.
        """
        context, context_again = contexts()
        self._calls.append(self._call(again, module, context_again, args, kwargs))
        self._outputs = []  # a unit that calls another one does not belong to its segment
        with saved_tensors_hooks(self._pack, self._unpack), context:
            result = forward(*args, **kwargs)
        tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self._outputs = [(weakref.ref(leaf), leaf._version) for leaf in tensors]
        return result

    def _call(self, again: Forward, module: nn.Module, context: Context, args: Any, kwargs: Any) -> Call:
        leaves, structure = tree_flatten((args, kwargs))
        arguments: list[Any] = []
        kept: list[Tensor] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                _require_no_cache(leaf)
                arguments.append(leaf)
            elif (place := self._place_of(leaf)) is not None:
                arguments.append(_Output(place))
            else:
                arguments.append(_Kept(len(kept)))
                kept.append(leaf)
        with self._saving():
            saved = _saved(kept)
        devices = {"cpu", *(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))}
        usable = sorted(filter(torch.amp.is_autocast_available, devices))
        return Call(
            again,
            tuple(arguments),
            structure,
            saved,
            RandomState.now(),
            tuple((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in usable),
            torch.is_autocast_cache_enabled(),
            _copies_of_buffers(module),
            context,
        )

    def _place_of(self, tensor: Tensor) -> int | None:
        for place, (output, version) in enumerate(self._outputs):
            if output() is tensor and tensor._version == version:
                return place
        return None

    def _pack(self, tensor: Tensor) -> _Handle:
        handle = _Handle(_kind(tensor))
        self._handles.append(weakref.ref(handle))
        return handle

    def _unpack(self, handle: _Handle) -> Tensor:
        if handle not in self._recomputed:
            self._recompute()
        return self._recomputed.pop(handle)

    def _recompute(self) -> None:
        self._position = 0
        outputs: list[Tensor] = []
        try:
            with kept_random_state(), torch.enable_grad(), saved_tensors_hooks(self._record, _unchanged):
                for call in self._calls:
                    outputs = [output for output in tree_leaves(call.repeat(outputs)) if isinstance(output, Tensor)]
        except _RecomputedAllError:
            return
        raise difference(f"{len(self._handles)} tensors", f"{self._position}")

    def _record(self, tensor: Tensor) -> Tensor:
        handle = self._handles[self._position]()
        self._position += 1
        detached = tensor.detach()  # an operation that saved its own result would stay in memory with it
        if handle is not None:
            if handle.kind != _kind(tensor):
                raise difference(f"a tensor of {handle.kind}", f"one of {_kind(tensor)}")
            self._recomputed[handle] = detached
        if self._position == len(self._handles):
            raise _RecomputedAllError
        return detached


def difference(before: str, now: str) -> UsageError:
    """Return the error for a unit that saves something else for the backward pass when it is recomputed."""
    return UsageError(
        f"a unit saved {before} for the backward pass, but {now} when it was recomputed; its forward pass must do the same for the same "
        "input, buffers and random numbers, so set activations.keep=all or name other activations.units"
    )


def _require_no_cache(argument: Any) -> None:
    """Refuse an object like the caches of Hugging Face: a recomputation would add the keys and values of the unit once more."""
    if any(base.__name__.endswith("Cache") for base in type(argument).__mro__):
        raise UsageError(
            f"a unit got a {type(argument).__name__} that its forward pass fills, so it cannot be recomputed; set "
            "model.config.use_cache=False, or call the model with use_cache=False in training, or set activations.keep=all"
        )


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _copies_of_buffers(module: nn.Module) -> tuple[tuple[dict[str, Tensor | None], str, Tensor | None], ...]:
    """Return copies of a module's buffers, with their places. A tensor that is in several places is copied once."""
    copies: dict[int, Tensor] = {}
    replaced = []
    for layer in module.modules():
        for key, buffer in layer._buffers.items():
            if buffer is not None and id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone()
            replaced.append((layer._buffers, key, None if buffer is None else copies[id(buffer)]))
    return tuple(replaced)


@contextmanager
def _with_buffers(buffers: Sequence[tuple[dict[str, Tensor | None], str, Tensor | None]]) -> Iterator[None]:
    """Give a module other buffers inside the block. Autograd may have saved its own buffers, so they are not changed in place."""
    now = [(places, key, places[key]) for places, key, _ in buffers]
    copies = {id(value): value.clone() for _, _, value in buffers if value is not None}
    try:
        for places, key, value in buffers:
            places[key] = None if value is None else copies[id(value)]
        yield
    finally:
        for places, key, value in now:
            places[key] = value


def no_contexts() -> tuple[Context, Context]:
    """Return contexts without an effect."""
    return nullcontext(), nullcontext()
