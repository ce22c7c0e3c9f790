"""Host memory for tensors that autograd saves, with the strides and offsets of the tensors: other strides can give other bits."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from undula.state.pieces import is_sharded_tensor


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
