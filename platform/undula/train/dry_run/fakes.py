"""Fake tensors in place of the real ones of a module and of its batches."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from undula.data.nested import tensors_of, with_tensors
from undula.data.reader import SampleReader, Samples
from undula.train.dry_run.storages import LiveStorages

Places = list[tuple[nn.Module, str, Tensor]]
"""Tensors of layers, each with its layer and its name."""


def make_fake(module: nn.Module, fakes: FakeTensorMode) -> Places:
    """Replace the real parameters and buffers of a module, which it got before its session began, by fake ones. Return the real ones."""
    known: dict[int, Any] = {}
    replaced: Places = []
    for layer in module.modules():
        own = [*layer.named_parameters(recurse=False, remove_duplicate=False)]
        for name, tensor in [*own, *layer.named_buffers(recurse=False, remove_duplicate=False)]:
            if not isinstance(tensor, FakeTensor):
                replaced.append((layer, name, tensor))
                setattr(layer, name, known.setdefault(id(tensor), fakes.from_tensor(tensor)))
    return replaced


def put_back(replaced: Places) -> None:
    """Put the real tensors of a module back."""
    for layer, name, tensor in replaced:
        setattr(layer, name, tensor)


class FakeRows:
    """Reader that returns arbitrary samples, with fake tensors in place of real ones.

    Args:
        reader: Reader of the samples.
        live: Counter of the storages.
        fakes: Mode of the fake tensors; None if tensors are real.
        lengths: Set that gets the number of tokens of the samples of each micro-batch.
    """

    def __init__(
        self, reader: SampleReader, live: LiveStorages, fakes: FakeTensorMode | None, lengths: set[int | None]
    ):
        self._reader, self._live, self._fakes, self._lengths = reader, live, fakes, lengths
        self.close = reader.close

    def open(self) -> None:
        """Do nothing, because a few samples are read without reading ahead."""

    def take(self, virtual_worker: int, count: int) -> Samples:
        with _disable_current_modes():
            samples = self._reader.any_rows(count)
        self._lengths.add(length_of(tensors_of(samples.batch), count))
        return replace(samples, batch=with_tensors(samples.batch, self._counted))

    def any_rows(self, count: int) -> Samples:
        return self.take(0, count)

    def _counted(self, tensor: Tensor) -> Tensor:
        fake: Tensor = tensor if self._fakes is None else self._fakes.from_tensor(tensor)
        self._live.add(fake)
        return fake


def length_of(tensors: Iterable[Tensor], samples: int) -> int | None:
    """Return the number of tokens of each sample of a micro-batch: the length of its integer tensors of shape [samples, length].

    The result is None if it has no such tensor, or some of different lengths.
    """
    lengths = {
        tensor.shape[1]
        for tensor in tensors
        if tensor.ndim == 2 and len(tensor) == samples and tensor.dtype in _INTEGERS
    }
    return lengths.pop() if len(lengths) == 1 else None


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
