"""Memory and computation of a block of code, counted where torch calls its operations, on real or on fake tensors."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from undula.plan.work import Work

WITHOUT_SIZES = (torch.ops.aten.mkldnn_rnn_layer, torch.ops.aten._cudnn_rnn)
"""Operations whose results have other sizes if they are fake: what they keep for the backward pass is missing."""

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention, torch.ops.aten._scaled_dot_product_flash_attention_backward
_ON_CPU = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
FORMULAS = {**flop_registry, **{cpu: flop_registry[gpu] for cpu, gpu in zip(_ON_CPU, _FLASH, strict=True)}}
"""Formulas of floating-point operations. torch has none for attention on the CPU, which has the arguments of that on a GPU."""


class UnknownSizeError(RuntimeError):
    """An operation on fake tensors, whose results have other sizes than those of real ones."""


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operations in the block have made and that are alive.

    Fake tensors have no values. Where a script reads a floating-point number, for example to print a loss, it gets 1.0, because
    such a number seldom decides a shape. Where it reads another value, torch raises an error.

    Attributes:
        bytes: Bytes that are alive now.
        before: Bytes that were alive at `begin`.
        peak: Most bytes that were alive since `begin`.
        work: What operations since `begin` compute.
        has_whole_attention: Whether torch had no kernel for an attention and has made all of its weights, as with a mask that trains. GPUs
            have more kernels.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self.work = Work()
        self.has_whole_attention = False
        self.before = 0
        self._begins = False
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def begin(self) -> None:
        """Begin to count anew, except for what is alive."""
        self._begins = False
        self.before = self.peak = self.bytes
        self.work = Work()

    def begin_with_next(self) -> None:
        """Begin to count anew with the next operation, when the script has freed what it replaces."""
        self._begins = True

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, unless it is counted already or has no memory in a run either."""
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return  # a sparse tensor consists of others
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or not size:
            return

        def free(_: object) -> None:
            del self._alive[key]
            self.bytes -= size

        self._alive[key] = weakref.ref(storage, free)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.ops.aten._local_scalar_dense.default
            and isinstance(args[0], FakeTensor)
            and args[0].is_floating_point()
        ):
            return 1.0
        if self._begins:
            self.begin()
        if func.overloadpacket in WITHOUT_SIZES and any(isinstance(leaf, FakeTensor) for leaf in args):
            raise UnknownSizeError(f"a fake tensor of {func} has another size than a real one")
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # asks fake tensors for their device
            return result
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in made:
            self.add(tensor)
        if func.is_view:
            return result
        self.has_whole_attention |= func.overloadpacket is torch.ops.aten._safe_softmax
        formula, kernels = FORMULAS.get(func.overloadpacket), _kernel_bytes(func, args)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.work += Work(
            formula(*args, **(kwargs or {}), out_val=result) if formula else 0,
            0 if formula and not kernels else sum(map(_bytes_of, (*read, *made))),
            1,
            int(kernels > 0),
            kernels,
        )
        return result


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _kernel_bytes(func: Any, args: Any) -> int:
    """Return the bytes of weights that a convolution reads and of their gradient that its backward pass writes; 0 for other operations."""
    if "convolution" not in func.name():
        return 0
    return 2 * _bytes_of(args[2]) if "backward" in func.name() else _bytes_of(args[1])


class WithoutAttentionDropout(TorchFunctionMode):
    """Leaves the dropout of `scaled_dot_product_attention` out.

    On the CPU, torch has no kernel with dropout that saves memory and computes all weights of an attention; those of GPUs do not.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            names = ("attn_mask", "dropout_p", "is_causal")  # which may be given by position
            kwargs = {**dict(zip(names, args[3:], strict=False)), **kwargs, "dropout_p": 0.0}
            args = args[:3]
        return func(*args, **kwargs)


def storage_bytes(tensors: Any) -> int:
    """Return the bytes of the storages of dense tensors, in any nesting. What several tensors share counts once."""
    strided = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    storages = [tensor.untyped_storage() for tensor in strided]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
