"""Sums of the bits of tensors, by which a change of any element is seen, whichever way a script has made it.

Counts of changes in place, as torch keeps them, miss what is written by way of `.data`, by NumPy or to the local part of a DTensor.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from undula.state.pieces import dense_strides

COLUMNS = 16_381
"""Number of columns over which words are summed up. It is prime, so that rows of a weight that change places are seen."""
BUCKET_BYTES = 2 * 2**20
"""Maximum size of small tensors that are copied to be summed up together."""
ALONE_BYTES = 2**18
"""Size in bytes above which a tensor is summed up alone, which saves a copy of it."""
COPIED_ROWS = 256
"""Maximum number of rows of a word for each column that are copied at once, 32 MiB."""
Fingerprint: TypeAlias = dict[torch.device, Tensor]
"""Sums by device: tensors of dtype int64."""


class Watched:
    """Tensors whose changes are seen in their fingerprints.

    The bits of a tensor are taken as words of 64 bits, which are added up modulo 2^64 by columns, and then, times an odd factor for each
    column, to one number. This is done twice, the second time with words that begin 32 bits later: in one sum, two changes of the highest
    bit, which is the sign of a number, would cancel out. A change is missed only if the changes of all words cancel out in both sums.

    Args:
        tensors: Callback that returns the tensors. They and their memory may be others in each call. Of a DTensor, the local part counts.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]):
        self._tensors = tensors
        self._places: list[tuple[int, int, torch.device]] = []
        self._buckets: list[list[Tensor]] = []
        """Bytes of the tensors at these places, in groups that are added up together."""
        self._factors: dict[torch.device, Tensor] = {}

    def take(self) -> Fingerprint:
        """Return the fingerprint of the tensors as they are now. A GPU is not waited for."""
        tensors = [part for tensor in self._tensors() for part in _parts(tensor) if part.numel() and not part.is_meta]
        places = [(tensor.data_ptr(), tensor.nbytes, tensor.device) for tensor in tensors]
        if places != self._places:
            self._places = places if all(map(_is_dense, tensors)) else []  # bytes of the others are copies
            self._buckets = _buckets([_bytes_of(tensor) for tensor in tensors])
        sums: dict[torch.device, list[Tensor]] = {}
        for bucket in self._buckets:
            flat = bucket[0] if len(bucket) == 1 and bucket[0].data_ptr() % 8 == 0 else torch.cat(bucket)
            sums.setdefault(flat.device, []).extend(self._sums(flat))
        return {device: torch.stack(of_device) for device, of_device in sums.items()}

    def release(self) -> None:
        """Forget the tensors, which would stay in memory where others take their places."""
        self._places, self._buckets = [], []

    def _sums(self, flat: Tensor) -> list[Tensor]:
        """Return the two sums of bytes in one dimension, as scalars."""
        if flat.device not in self._factors:
            draws = torch.Generator().manual_seed(0)
            drawn = torch.randint(2**62, (COLUMNS,), generator=draws, dtype=torch.int64, device="cpu")
            self._factors[flat.device] = (2 * drawn + 1).to(flat.device)
        factors, rest = self._factors[flat.device], len(flat) % 8
        words = flat[: len(flat) - rest].view(torch.int64)
        end = (flat[len(flat) - rest :].long() * factors[:rest]).sum()
        return [_sum(words, factors) + end, _sum_of_later_words(flat, words, factors)]


def _sum(words: Tensor, factors: Tensor, shift: int = 0) -> Tensor:
    columns, count = torch.zeros_like(factors), len(words) // COLUMNS * COLUMNS
    for rows in torch.split(words[:count].view(-1, COLUMNS), COPIED_ROWS):
        columns += (rows >> shift if shift else rows).sum(0)
    columns[: len(words) - count] += words[count:] >> shift
    return (columns * factors).sum()


def _sum_of_later_words(flat: Tensor, words: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of words that begin 32 bits after those of some bytes, or of the higher halves of these, which says as much."""
    if flat.device.type == "cpu" and type(flat) is Tensor and len(words) > 1:  # torch itself has no such view
        return _sum(torch.from_numpy(flat.numpy()[4 : 8 * len(words) - 4].view(np.int64)), factors)
    return _sum(words, factors, shift=32)


def differ(one: Fingerprint, other: Fingerprint) -> Tensor:
    """Return a Boolean scalar on the device, which says whether two fingerprints are different."""
    if {device: sums.shape for device, sums in one.items()} != {device: sums.shape for device, sums in other.items()}:
        return torch.tensor(True, device="cpu")
    differences = [(sums != other[device]).any() for device, sums in one.items()]
    last = max(differences, key=lambda each: each.device.type != "cpu", default=torch.tensor(False, device="cpu"))
    return torch.stack([each.to(last.device, non_blocking=True) for each in differences]).any() if differences else last


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that have the elements of a tensor of this process."""
    if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided:
        yield tensor.detach()
    elif isinstance(
        local := getattr(tensor, "_local_tensor", None), Tensor
    ):  # reading it records no operation of a DTensor
        yield from _parts(local)
    elif flatten := getattr(tensor, "__tensor_flatten__", None):
        for name in flatten()[0]:
            yield from _parts(getattr(tensor, name))
    elif tensor.layout == torch.sparse_coo:
        whole = tensor.detach().coalesce()
        yield from (whole.indices(), whole.values())
    elif tensor.layout != torch.strided:
        yield tensor.detach().values()  # changes of indices alone are not seen
    else:
        yield tensor.detach()


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are those in its memory, without gaps."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.is_contiguous() or tuple(tensor.stride()) == dense_strides(tensor)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in one dimension, in the order of its memory if that has no gaps."""
    if _is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _buckets(flats: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return tensors of bytes in groups: large ones alone, and small ones of one device together."""
    buckets: list[list[Tensor]] = []
    open_buckets: dict[torch.device, tuple[int, list[Tensor]]] = {}
    for flat in flats:
        size, bucket = open_buckets.get(flat.device, (BUCKET_BYTES, []))
        if flat.nbytes > ALONE_BYTES:
            buckets.append([flat])
            continue
        if size + flat.nbytes > BUCKET_BYTES:
            size, bucket = 0, []
            buckets.append(bucket)
        bucket.append(flat)
        open_buckets[flat.device] = size + flat.nbytes, bucket
    return buckets
