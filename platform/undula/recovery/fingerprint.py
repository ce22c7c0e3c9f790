"""Sums of the bits of tensors, by which a change of any element is seen, whichever way a script has made it.

Counts of changes in place, as torch keeps them, miss what is written by way of `.data`, by NumPy or to the local part of a DTensor.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from undula.state.pieces import dense_strides

COLUMNS = 4_093
"""Number of columns in which the words of a whole chunk are added up first. It is prime, so that rows of a weight that change places are
seen."""
CACHED_ROWS = 16
"""Number of words of a column in a chunk on a CPU, whose cache holds it for the second sum."""
MOST_ROWS = 1_024
"""Number of words of a column in a chunk on other devices, which copy the chunk of 32 MiB for the second sum."""
FACTORS = 4 * COLUMNS
"""Number of odd factors, and so the maximum number of words that are not added up by columns first."""
ALONE_BYTES_ON_CPU = 2**12
"""Size in bytes from which a tensor on a CPU is summed up alone, which saves a copy of it."""
ALONE_BYTES = 2**18
"""The same on other devices, where each operation takes a while to be launched."""
BUCKET_BYTES = 2 * 2**20
"""Maximum size of small tensors that are copied to be summed up together."""
Words = TypeVar("Words", Tensor, npt.NDArray[np.int64])
Fingerprint: TypeAlias = dict[torch.device, Tensor]
"""Sums by device: tensors of dtype int64."""


class Watched:
    """Tensors whose changes are seen in their fingerprints.

    The bits of a tensor are taken as words of 64 bits, which are multiplied by odd factors and added up modulo 2^64, in chunks. Those of a
    large chunk are added up by columns first. This is done twice, the second time with words that begin 32 bits later: in one sum, two
    changes of the highest bit, which is the sign of a number, would cancel out. A change is missed only if the changes of all words of a
    chunk cancel out in both sums.

    Args:
        tensors: Callback that returns the tensors. They and their memory may be others in each call. Of a DTensor, the local part counts.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]):
        self._tensors = tensors
        self._places: list[tuple[int, int, torch.device]] = []
        self._chunks: list[Tensor] = []
        """Words of the large tensors at these places."""
        self._buckets: list[list[Tensor]] = []
        """Bytes of the small tensors at these places, in groups that are added up together."""
        self._factors: dict[torch.device, Tensor] = {}

    def take(self) -> Fingerprint:
        """Return the fingerprint of the tensors as they are now. A GPU is not waited for."""
        tensors = [part for tensor in self._tensors() for part in _parts(tensor) if part.numel() and not part.is_meta]
        places = [(tensor.data_ptr(), tensor.nbytes, tensor.device) for tensor in tensors]
        if places != self._places:
            self._places = places if all(map(_is_dense, tensors)) else []  # bytes of the others are copies
            flats = [_bytes_of(tensor) for tensor in tensors]
            self._chunks = [chunk for flat in flats if _is_alone(flat) for chunk in _chunks(flat)]
            self._buckets = _buckets([flat for flat in flats if not _is_alone(flat)])
        sums: dict[torch.device, list[Tensor]] = {}
        of_buckets = (chunk for bucket in self._buckets for chunk in _chunks(_together(bucket)))
        for chunk in chain(self._chunks, of_buckets):
            sums.setdefault(chunk.device, []).extend(self._sums(chunk))
        return {device: torch.stack(of_device) for device, of_device in sums.items()}

    def release(self) -> None:
        """Forget the tensors, which would stay in memory where others take their places."""
        self._places, self._chunks, self._buckets = [], [], []

    def _sums(self, chunk: Tensor) -> list[Tensor]:
        """Return the sum of words times factors, and that of their higher halves unless these are in a chunk of their own."""
        if chunk.device not in self._factors:
            draws = torch.Generator().manual_seed(0)
            drawn = torch.randint(2**62, (FACTORS,), generator=draws, dtype=torch.int64, device="cpu")
            self._factors[chunk.device] = (2 * drawn + 1).to(chunk.device)
        factors = self._factors[chunk.device][: chunk.shape[-1]]
        if _is_array(chunk):
            return [torch.dot(_added_up(chunk), factors)]
        return [(_added_up(words) * factors).sum() for words in (chunk, chunk >> 32)]


def _added_up(words: Tensor) -> Tensor:
    return words.sum(0) if words.dim() == 2 else words


def _is_alone(flat: Tensor) -> bool:
    """Return whether bytes are summed up where they are."""
    if flat.nbytes < (ALONE_BYTES_ON_CPU if flat.device.type == "cpu" else ALONE_BYTES):
        return False
    return _is_array(flat) or (flat.data_ptr() % 8 == 0 and flat.nbytes % 8 == 0)


def _chunks(flat: Tensor) -> list[Tensor]:
    """Return the words of bytes, and on a CPU also the words that begin 32 bits later, of which other devices have no view."""
    if not _is_array(flat):
        return _split(flat.view(torch.int64), MOST_ROWS)
    array, size = flat.numpy(), flat.nbytes
    last = array[-8:]  # includes the bytes after the last whole word
    views = array[: size // 8 * 8], array[4 : 4 + (size - 4) // 8 * 8], last
    chunks = [_split(view.view(np.int64), CACHED_ROWS) for view in views]
    # Those of both sums take turns, so that the second one finds its words in the cache.
    return [torch.from_numpy(chunk) for of_all in zip_longest(*chunks) for chunk in of_all if chunk is not None]


def _split(words: Words, rows: int) -> list[Words]:
    """Return words in parts of shape [at most `rows`, COLUMNS], and the rest in one dimension, for which there are factors."""
    count = len(words) // COLUMNS * COLUMNS if len(words) > FACTORS else 0
    parts: list[Words] = []
    for begin in range(0, count, rows * COLUMNS):
        parts.append(words[begin : min(begin + rows * COLUMNS, count)].reshape(-1, COLUMNS))
    parts.append(words[count:])
    return parts


def _together(bucket: list[Tensor]) -> Tensor:
    """Return bytes one after another, and bytes of 0 after them up to the end of a word."""
    rest = -sum(map(len, bucket)) % 8
    return torch.cat([*bucket, bucket[0].new_zeros(rest)])


def _is_array(tensor: Tensor) -> bool:
    """Return whether NumPy can read a tensor."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor


def differ(one: Fingerprint, other: Fingerprint) -> Tensor:
    """Return a Boolean scalar on the device, which says whether two fingerprints are different."""
    if {device: sums.shape for device, sums in one.items()} != {device: sums.shape for device, sums in other.items()}:
        return torch.tensor(True, device="cpu")
    differences = [(sums != other[device]).any() for device, sums in one.items()]
    last = max(differences, key=lambda each: each.device.type != "cpu", default=torch.tensor(False, device="cpu"))
    return torch.stack([each.to(last.device, non_blocking=True) for each in differences]).any() if differences else last


def digest_of(fingerprint: Fingerprint) -> Tensor:
    """Return 16 bits of a fingerprint as a number on the device. A GPU is not waited for."""
    sums = [(each * torch.arange(1, 2 * len(each), 2, device=each.device)).sum() for each in fingerprint.values()]
    last = max(sums, key=lambda each: each.device.type != "cpu", default=torch.tensor(0, device="cpu"))
    total = sum((each.to(last.device, non_blocking=True) for each in sums), torch.zeros_like(last))
    return (total ^ total >> 16 ^ total >> 32 ^ total >> 48) & 0xFFFF


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
    """Return bytes of tensors in groups of one device."""
    buckets: list[list[Tensor]] = []
    open_buckets: dict[torch.device, tuple[int, list[Tensor]]] = {}
    for flat in flats:
        size, bucket = open_buckets.get(flat.device, (BUCKET_BYTES, []))
        if size + flat.nbytes > BUCKET_BYTES:
            size, bucket = 0, []
            buckets.append(bucket)
        bucket.append(flat)
        open_buckets[flat.device] = size + flat.nbytes, bucket
    return buckets
