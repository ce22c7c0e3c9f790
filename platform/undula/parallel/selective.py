"""Results of expensive operations, which a unit keeps so that its recomputation does not run these operations again.

torch's own contexts for this give each result once, and fail if a backward pass goes through the same graph again, as with second-order
gradients, or if the forward pass has changed a kept result in place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from undula.parallel.recompute import Context, difference

EXPENSIVE = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
)
"""Operations of aten whose results are kept: recomputing them would take most of the time."""


def keeping_expensive() -> tuple[Context, Context]:
    """Return a context that keeps the results of expensive operations, and one that returns them to a recomputation."""
    results: list[_Result] = []
    return _Keeping(results), _Reusing(results)


def is_kept(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the result of an operation is kept. After one that drew random numbers, later ones would draw others than before."""
    if operation.name().removeprefix("aten::").partition(".")[0] not in EXPENSIVE:
        return False
    names = [argument.name for argument in operation._schema.arguments]
    return not {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0)


@dataclass(frozen=True)
class _Result:
    """Result of an operation."""

    operation: Any
    value: Any
    versions: list[int]
    """Versions of the tensors in it. In-place operations of the forward pass change them."""

    @property
    def is_unchanged(self) -> bool:
        return _versions(self.value) == self.versions


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, results: list[_Result]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that a script compiles run compiled inside a unit."""
        return True


class _Keeping(_Mode):  # type: ignore[no-untyped-call]
    """Keeps the results of expensive operations in their order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_kept(func, args, kwargs or {}):
            value = tree_map_only(Tensor, _alias, result)
            self._results.append(_Result(func, value, _versions(value)))
        return result


class _Reusing(_Mode):  # type: ignore[no-untyped-call]
    """Returns the kept results in their order, each time that it is entered. What has changed in place is computed again."""

    def __enter__(self) -> Any:
        self._position = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_kept(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        kept = self._results[self._position] if self._position < len(self._results) else None
        self._position += 1
        if kept is None or kept.operation is not func:
            raise difference(f"the result of {kept.operation}" if kept else "nothing more", f"that of {func}")
        return tree_map_only(Tensor, _alias, kept.value) if kept.is_unchanged else func(*args, **(kwargs or {}))


def _alias(tensor: Tensor) -> Tensor:
    """Return another tensor with the same memory and the same version, to which autograd can give a history of its own."""
    # Below autograd, where modes are called, detach() would give the alias a version of its own.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(value: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
