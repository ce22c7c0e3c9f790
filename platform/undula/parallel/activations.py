"""Activations that a model keeps for the backward pass. It recomputes the others from them, or keeps them in host memory.

The forward pass of each unit is replaced by one that frees its activations. The modules and their names stay as they are, so that
checkpoints fit whatever a job keeps.

Also here: forward passes of a script's modules that the platform replaces for as long as the model trains.

A replacement is an attribute of the one module. What copies the module, such as `copy.deepcopy`, `AveragedModel` or pickle, copies its
attributes, and a copy with the replacement would compute with the weights of the original. So a replacement copies as what it replaces.

Also here: host memory for tensors that autograd saves, with the strides and offsets of the tensors: other strides can give other bits.

Also here: results of expensive operations, which a unit keeps so that its recomputation does not run these operations again.

torch's own contexts for this give each result once, and fail if a backward pass goes through the same graph again, as with second-order
gradients, or if the forward pass has changed a kept result in place.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from undula.errors import UsageError
from undula.parallel.recompute import Context, MakeContexts, Segment, difference, no_contexts
from undula.parallel.spec import ActivationsSpec
from undula.parallel.units import problem_of_units, units_of
from undula.state.pieces import is_sharded, is_sharded_tensor

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


class _HostStorage:
    """Copy of a storage in host memory, which is pinned if the storage is on a GPU."""

    def __init__(self, storage: torch.UntypedStorage):
        self._device = storage.device
        self._host = torch.empty(
            storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=self._device.type == "cuda"
        )
        self._host.copy_(_bytes_of(storage))
        self._back: weakref.ref[torch.UntypedStorage] | None = None

    def back(self) -> torch.UntypedStorage:
        """Return the storage on its device. Tensors that share it use the same one, as long as one of them is in use."""
        copied = self._back() if self._back else None
        if copied is None:
            copied = self._host.to(self._device, copy=True, non_blocking=True).untyped_storage()
            self._back = weakref.ref(copied)
        return copied


class _Saved:
    """A tensor in host memory."""

    def __init__(self, tensor: Tensor, storage: _HostStorage):
        self._storage = storage
        self._dtype = tensor.dtype
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())

    def load(self) -> Tensor:
        storage = self._storage.back()
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._view)


class InHostMemory(saved_tensors_hooks):
    """Context in which autograd saves tensors in host memory. They are copied back when they are used.

    Args:
        unit: Module whose parameters and buffers stay where they are; None for none.
    """

    def __init__(self, unit: nn.Module | None = None):
        tensors = () if unit is None else (*unit.parameters(), *unit.buffers())
        self._own = {tensor.untyped_storage()._cdata for tensor in tensors if not is_sharded_tensor(tensor)}
        self._copies: dict[int, tuple[torch.UntypedStorage, int, _HostStorage]] = {}
        """Copies by the address of the storage, with the storage itself, so that no other gets this address, and its version."""
        super().__init__(self._pack, _unpack)

    def __exit__(self, *arguments: object) -> None:
        super().__exit__(*arguments)
        self._copies = {}

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.is_conj() or tensor.is_neg() or tensor.untyped_storage()._cdata in self._own:
            return tensor
        storage, version = tensor.untyped_storage(), tensor._version
        known = self._copies.get(storage._cdata)
        if known is None or known[1] != version:
            known = self._copies[storage._cdata] = storage, version, _HostStorage(storage)
        return _Saved(tensor, known[2])


def _unpack(saved: Tensor | _Saved) -> Tensor:
    return saved.load() if isinstance(saved, _Saved) else saved


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    empty: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[no-any-return]


class Replacement:
    """Base class of callables that take the place of a module's forward pass. Copies of the module have their own one instead."""

    def __init__(self, module: nn.Module):
        self.replaced: Callable[..., Any] = module.forward

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the replaced method, whose copy is a method of the copy of the module."""
        return _itself, (self.replaced,)


def replace_forward(module: nn.Module, replacement: Replacement) -> Callable[[], None]:
    """Replace the forward pass of a module, and return a function that undoes this."""
    former = module.__dict__.get("forward")
    module.forward = replacement  # type: ignore[assignment]
    return partial(_restore, module, former)


def call_all(functions: Sequence[Callable[[], None]]) -> None:
    """Call functions one after another, such as those that undo several replacements."""
    for function in functions:
        function()


def _restore(module: nn.Module, former: Callable[..., Any] | None) -> None:
    if former is None:
        del module.forward
    else:
        module.forward = former


def _itself(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


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
