"""What a training step gathers for metrics: it may be logged and kept, and may not become a part of the loss.

A batch does not see the batches of other processes, so that a loss with a gathered value in it would be another one than that of as many
processes as there are virtual workers. The mark stays on what is computed from a gathered value, tensors and numbers alike. What would lose
it, such as float() or a comparison, is refused while a batch is open, in which it could decide on the loss.
"""

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_leaves, tree_map, tree_map_only

from undula.errors import UsageError

_INSTEAD = (
    "; compute the loss from the batch alone, or with num_items_in_batch, which compute_loss() gets for the whole step"
)
_NOT_FOR_LOSS = (
    "what accelerator.gather() returned in a training step is used for the loss, but a batch does not see the batches of other "
    f"processes{_INSTEAD}, and gather for metrics only"
)
_READERS: dict[Any, str] = {
    **{
        getattr(Tensor, f"__{name}__"): f"{name}()"
        for name in ("bool", "float", "int", "index", "complex", "len", "contains", "array")
    },
    **{getattr(Tensor, name): f"{name}()" for name in ("numpy", "size", "numel", "nelement", "equal", "allclose")},
    **{getattr(torch, name): f"torch.{name}()" for name in ("equal", "allclose", "numel", "is_nonzero")},
    Tensor.is_nonzero: "is_nonzero()",
    Tensor.shape.__get__: "shape",  # type: ignore[attr-defined]
    Tensor.data_ptr: "data_ptr()",
}
"""Functions that return something of a tensor that cannot have the mark, with their names for messages."""
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


class Gathered(Tensor):
    """A tensor that a step has gathered, or that was computed from one."""

    is_in_batch = False
    """Whether a batch is open, whose loss can depend on what is read of such a tensor."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_trained(args, kwargs)
        _refuse_written(function, args, kwargs or {})
        if function in _READERS:
            _refuse_read(_READERS[function])
        result = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if getattr(function, "__name__", "").strip("_") in _COMPARISONS and _is_zero(args[1:]):
            return result.as_subclass(Tensor)
        return _marked(result) if function in (Tensor.item, Tensor.tolist) else result

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if self.ndim == 0 else str(self)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self._plain()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Tensor.clone, (self._plain(),)

    def _plain(self) -> Tensor:
        return self.detach().as_subclass(Tensor).clone()


class GatheredNumber:
    """A number of such a tensor. It is no float, because C code, such as that of math.sqrt(), reads floats unnoticed."""

    def __init__(self, value: float):
        self._value = value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_trained(args, kwargs)
        _refuse_written(function, args, kwargs or {})
        args, kwargs = tree_map_only(cls, lambda number: number._value, (args, kwargs or {}))
        return _marked(function(*args, **kwargs))

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        _refuse_read("NumPy")
        return np.asarray(self._value, dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._value, name)

    def __repr__(self) -> str:
        return repr(self._value)

    def __format__(self, form: str) -> str:
        return format(self._value, form)

    def __reduce__(self) -> Any:
        return type(self._value), (self._value,)

    def __deepcopy__(self, memo: Any) -> float:
        return self._value


Real.register(GatheredNumber)


def _computed(function: Callable[..., Any], is_reflected: bool = False) -> Callable[..., Any]:
    """Return an operator whose result has the mark."""

    def compute(number: GatheredNumber, *others: Any) -> Any:
        if any(isinstance(other, Tensor) for other in others):
            return NotImplemented  # the tensor's own operator refuses what would be trained
        values = [number._value, *map(plain, others)]
        return _marked(function(*reversed(values) if is_reflected else values))

    return compute


def _read(function: Callable[..., Any], call: str) -> Callable[..., Any]:
    """Return an operator whose result cannot have the mark."""

    def read(number: GatheredNumber, *others: Any) -> Any:
        if not _is_zero(others):
            _refuse_read(call)
        return function(number._value, *map(plain, others))

    return read


_COMPUTED = {
    **{name: getattr(operator, name) for name in ("neg", "pos", "abs")},
    "round": round,
    "ceil": math.ceil,
    "floor": math.floor,
    "trunc": math.trunc,
}
_READ: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (float, int, bool, complex)},
    "hash": hash,
    "index": operator.index,
}
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(GatheredNumber, f"__{_name}__", _computed(getattr(operator, _name)))
    setattr(GatheredNumber, f"__r{_name}__", _computed(getattr(operator, _name), is_reflected=True))
for _name, _function in _COMPUTED.items():
    setattr(GatheredNumber, f"__{_name}__", _computed(_function))
for _name in _COMPARISONS:
    setattr(GatheredNumber, f"__{_name}__", _read(getattr(operator, _name), "a comparison"))
for _name, _function in _READ.items():
    setattr(GatheredNumber, f"__{_name}__", _read(_function, f"{_name}()"))


@contextmanager
def open_batch() -> Iterator[None]:
    """Refuse to read what a batch has gathered, as long as its loss can depend on it."""
    Gathered.is_in_batch = True
    try:
        yield
    finally:
        Gathered.is_in_batch = False


def refuse_gathered(loss: Tensor) -> None:
    """Refuse a loss that is computed from what a step has gathered alone.

    Raises:
        UsageError: It is.
    """
    if isinstance(loss, Gathered):
        raise UsageError(_NOT_FOR_LOSS)


def metrics_of_batch(value: Any) -> Any:
    """Return what a script gathers in a step, as a single process does, for metrics. Trainers of TRL gather metrics there."""
    return tree_map_only(Tensor, lambda tensor: _marked(tensor.detach()), value)


def plain(value: Any) -> Any:
    """Return a value without the mark, for what is recorded and not computed with."""
    return tree_map_only(GatheredNumber, lambda number: number._value, value)


def _is_zero(others: tuple[Any, ...]) -> bool:
    """Return whether a value is compared with 0, as before a metric is divided by it."""
    return len(others) == 1 and isinstance(others[0], int | float) and others[0] == 0


def _refuse_read(call: str) -> None:
    if Gathered.is_in_batch:
        raise UsageError(
            f"what accelerator.gather() returned in a training step is read by {call}, after which it could become a part of the loss, but "
            f"a batch does not see the batches of other processes{_INSTEAD}; for a metric, keep and log the tensor or what .item() returns"
        )


def _refuse_trained(*arguments: Any) -> None:
    """Refuse an operation whose result would be trained."""
    others = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and not isinstance(leaf, Gathered))
    if torch.is_grad_enabled() and any(other.requires_grad for other in others):
        raise UsageError(_NOT_FOR_LOSS)


def _refuse_written(function: Any, args: Any, kwargs: Any) -> None:
    """Refuse to write a gathered value into a tensor without the mark, which a loss can then depend on."""
    name = getattr(function, "__name__", "")
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    written = (args[:1] if is_in_place else (), kwargs.get("out"))
    if tree_any(lambda leaf: isinstance(leaf, Tensor) and not isinstance(leaf, Gathered), written):
        _refuse_read(f"{name}() of another tensor")


def _marked(value: Any) -> Any:
    """Return a result of gathered values that shows where it is from."""
    if isinstance(value, list | tuple):
        return tree_map(_marked, value)
    if isinstance(value, Tensor):
        return value.as_subclass(Gathered)
    return GatheredNumber(value) if isinstance(value, int | float) else value
