"""What a training step gathers for metrics: it may be logged and kept, and may not become a part of the loss.

A batch does not see the batches of other processes, so that a loss with a gathered value in it would be another one than that of as many
processes as there are virtual workers. The mark stays on what is computed from a gathered value, tensors and numbers alike.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from undula.errors import UsageError

_NOT_FOR_LOSS = (
    "what accelerator.gather() returned in a training step is used for the loss, but a batch does not see the batches of other "
    "processes; compute the loss from the batch alone, and gather for metrics only"
)
_OPERATORS = [
    f"__{prefix}{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow") for prefix in ("", "r")
]


class Gathered(Tensor):
    """A tensor that a step has gathered, or that was computed from one."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_trained(args, kwargs)
        if function in (Tensor.__float__, Tensor.__int__):
            raise UsageError(
                "float() or int() of what accelerator.gather() returned loses where it is from; call .item()"
            )
        result = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return _marked(result) if function in (Tensor.item, Tensor.tolist) else result

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if self.ndim == 0 else str(self)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return torch.tensor(self.tolist(), dtype=self.dtype, device=self.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.tensor, (self.detach().as_subclass(Tensor).tolist(),)


class GatheredNumber(float):
    """A number of such a tensor. It is a float for integers as well, because an operation of a float with an int loses the mark."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_trained(args, kwargs)
        args, kwargs = tree_map_only(cls, lambda it: int(it) if it.is_integer() else float(it), (args, kwargs or {}))
        return _marked(function(*args, **kwargs))

    def __index__(self) -> int:
        if not self.is_integer():
            raise TypeError(f"{self!r} is no integer")
        return int(self)

    def __format__(self, form: str) -> str:
        return format(int(self) if form.endswith("d") else float(self), form)

    def __reduce__(self) -> Any:
        return float, (float(self),)


def _operator(name: str) -> Callable[..., Any]:
    return lambda number, *others: _marked(getattr(float, name)(number, *others))


for _name in (*_OPERATORS, "__neg__", "__pos__", "__abs__", "__round__", "__ceil__", "__floor__", "__trunc__"):
    setattr(GatheredNumber, _name, _operator(_name))


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


def _refuse_trained(*arguments: Any) -> None:
    """Refuse an operation whose result would be trained."""
    others = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and not isinstance(leaf, Gathered))
    if torch.is_grad_enabled() and any(other.requires_grad for other in others):
        raise UsageError(_NOT_FOR_LOSS)


def _marked(value: Any) -> Any:
    """Return a result of gathered values that shows where it is from."""
    if isinstance(value, list):
        return tree_map(_marked, value)
    if isinstance(value, Tensor):
        return value.as_subclass(Gathered)
    return GatheredNumber(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
