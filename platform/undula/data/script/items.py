"""Micro-batches of a script's dataset: samples by index, collated, with random numbers that are keyed by what they are drawn for.

A sample's random numbers are keyed by (seed, epoch, index), and those of `collate_fn` by (seed, step, virtual worker, micro-batch). A
micro-batch therefore depends neither on the process that loads it nor on the world size.

Also here: random number generators of this process on the CPU: those of torch, Python and NumPy, which code of a script draws from.
"""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from mmap import mmap
from pathlib import Path
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import Dataset, default_collate

from undula.data.script.dataset import IndexedDataset, reads_several
from undula.data.script.pickling import SupportsWrite, pickle_into
from undula.errors import UsageError
from undula.plan.keys import Ids, Keys, key64, subkeys
from undula.plan.order import IndexOrder
from undula.plan.plan import Plan

# Every sample is seeded. What random.seed and np.random.seed do beside the seeding takes 10 us, 2 % of the time to load an image.
_of_python: random.Random = random.seed.__self__  # type: ignore[attr-defined]
_seed_python = super(random.Random, _of_python).seed
_seed_numpy = mtrand._rand.seed


def seed_generators(key: int) -> None:
    """Seed the generators with a 64-bit key. Generators of GPUs are not changed."""
    # torch.manual_seed formats the stack for each kind of device that is not in use, which takes a millisecond in total.
    torch.default_generator.manual_seed(for_torch(key))
    _seed_python(key)
    _of_python.gauss_next = None  # type: ignore[attr-defined]
    _seed_numpy(key & 0xFFFFFFFF)


def for_torch(key: int) -> int:
    """Return a 64-bit key as a seed for torch, which has 63 bits."""
    return key >> 1


def on_host() -> AbstractContextManager[object]:
    """Return a context in which torch makes tensors in host memory, as in loader processes, also if the script has set another default.

    Otherwise it is an empty one, because such a context makes each function of torch slower.
    """
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put the generators back on exit, so that code after the block draws what it would have drawn without the block."""
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


Collate: TypeAlias = Callable[[list[Any]], Any]
"""Function that makes a micro-batch of a list of samples, as `collate_fn` of torch's DataLoader."""
Purpose: TypeAlias = Literal["training", "validation"]


@dataclass(frozen=True)
class Request:
    """Samples of a micro-batch, and the keys of the random numbers that are drawn for them."""

    ids: Ids
    """Indices of the samples; shape [samples]."""
    sample_keys: Keys
    """Key of each sample; shape [samples]."""
    collate_key: int
    begins_epoch: bool = False
    """Whether the rank has no other samples in this epoch before these. A script may change its dataset between epochs."""


class Items(Dataset[Any]):
    """Dataset whose items are micro-batches of a script's dataset.

    Args:
        dataset: Dataset of the script. One that has `__getitems__` is asked for the samples of a micro-batch at once; the random numbers
            that it draws for them are keyed by the first of them.
        collate_fn: Function that makes a micro-batch of samples; by default that of torch, which stacks them.
    """

    def __init__(self, dataset: IndexedDataset, collate_fn: Collate | None = None):
        self._dataset = dataset
        self._collate = collate_fn or default_collate
        self._reads_several = reads_several(dataset)

    def __len__(self) -> int:
        """Return the number of samples of the dataset."""
        return len(self._dataset)

    def __getitem__(self, request: Request) -> Any:
        """Return the micro-batch of a request."""
        with on_host():  # whose generator is seeded
            return self._collated(request)

    def _collated(self, request: Request) -> Any:
        indices = request.ids.tolist()
        try:
            samples = self._several(indices, request) if self._reads_several else self._each(indices, request)
        except Exception as error:
            error.add_note(f"raised by the dataset for one of the samples {indices}")
            if "meta tensor" in str(error):
                error.add_note(
                    "a model reaches loader processes without the weights that train; freeze it with requires_grad_(False), or set "
                    "num_workers=0"
                )
            raise
        seed_generators(request.collate_key)
        return self._collate(samples)

    def _each(self, indices: list[int], request: Request) -> list[Any]:
        samples = []
        for index, key in zip(indices, request.sample_keys.tolist(), strict=True):
            seed_generators(key)
            samples.append(self._dataset[index])
        return samples

    def _several(self, indices: list[int], request: Request) -> list[Any]:
        seed_generators(int(request.sample_keys[0]))
        return list(self._dataset.__getitems__(indices))  # type: ignore[attr-defined]

    def digest(self) -> bytes:
        """Return a digest of what loader processes get: it changes when the script changes the dataset or the collate function."""
        sha = sha256()
        pickle_into(_Digest(sha), (self._dataset, self._collate), _by_content)
        return sha.digest()

    def dumps(self) -> bytes:
        """Pickle the dataset for loader processes.

        Raises:
            UsageError: It cannot be pickled, or a file that it has mapped was replaced.
        """
        file = BytesIO()
        self._pickle_into(file)
        return file.getvalue()

    def pickled_bytes(self) -> int:
        """Return the number of bytes that `dumps` returns, without making them.

        Raises:
            UsageError: As `dumps`.
        """
        size = _Size()
        self._pickle_into(size)
        return size.bytes

    def _pickle_into(self, file: SupportsWrite) -> None:
        try:
            pickle_into(file, (self._dataset, self._collate), _for_loaders)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"the dataset of run.dataset() cannot be sent to loader processes ({error}); open files and connections on the first "
                "sample instead of in __init__, leave open ones out in __getstate__, or set num_workers=0"
            ) from error

    @classmethod
    def loads(cls, content: bytes) -> "Items":
        """Return the dataset that `dumps` has pickled."""
        return cls(*pickle.loads(content))


class _Digest:
    """File that keeps only a digest of what is written to it."""

    def __init__(self, sha: Any):
        self.write = sha.update


class _Size:
    """File that keeps only the size of what is written to it."""

    bytes = 0

    def write(self, data: Any) -> None:
        self.bytes += memoryview(data).nbytes


_inodes: WeakKeyDictionary[mmap, int] = WeakKeyDictionary()
"""Inode of each mapped file of a dataset when the dataset was first pickled. A mapping itself does not say which file it has."""


def _for_loaders(value: Any) -> Any:
    """Return how a value is pickled for a loader process, if not as usual.

    A file that is mapped into memory is mapped there, too. The model that trains, which a collate function or a transform can hold, goes
    without its weights: they would be those of the first step for ever, and take memory in each process.
    """
    if isinstance(value, np.memmap) and _is_whole(value) and value.filename and value.mode == "r":
        order = "C" if value.flags.c_contiguous else "F"
        mapping: Any = value.base
        inode = _inodes.setdefault(mapping, Path(value.filename).stat().st_ino)
        _require_inode(value.filename, inode)
        return _mapped, (value.filename, inode, value.dtype, value.offset, value.shape, order)
    if isinstance(value, Parameter) and value.requires_grad:
        return _parameter_without_values, (value.shape, value.dtype)
    return NotImplemented


def _is_whole(array: Any) -> bool:
    """Return whether an array has all of a mapping, so that its offset in the file is known."""
    return isinstance(array.base, mmap)


def _mapped(file: str, inode: int, dtype: Any, offset: int, shape: tuple[int, ...], order: Any) -> Any:
    _require_inode(file, inode)
    return np.memmap(file, dtype, "r", offset, shape, order)


def _require_inode(file: str, inode: int) -> None:
    if Path(file).stat().st_ino != inode:
        raise UsageError(
            f"{file} was replaced after the dataset had mapped it; map it again before the first batch of an epoch"
        )


def _by_content(value: Any) -> Any:
    """Return how a value is pickled for a digest, for which torch's way would not do: it writes the addresses of tensors."""
    reduced = _for_loaders(value)
    if isinstance(value, np.memmap) and reduced is not NotImplemented:
        file = Path(str(value.filename)).stat()
        return tuple, ((str(reduced[1]), file.st_size, file.st_mtime_ns),)
    if reduced is not NotImplemented or not isinstance(value, Tensor) or value.layout != torch.strided:
        return reduced
    content = value.detach().resolve_conj().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return tuple, ((str(value.dtype), tuple(value.shape), content),)


def _parameter_without_values(shape: torch.Size, dtype: torch.dtype) -> Parameter:
    return Parameter(torch.empty(shape, dtype=dtype, device="meta"))


def requests(
    plan: Plan, virtual_workers: range, start: int, purpose: Purpose, world_size: int = 1
) -> Iterator[Request]:
    """Yield the micro-batches of some virtual workers from step `start` to the end of the plan, in the order in which steps take them.

    `world_size` workers may merge steps. With one worker, no steps are merged.
    """
    seed, order = plan.spec.seed, IndexOrder(plan, -1)
    samples, collate = key64(f"{purpose} sample", seed), key64(f"{purpose} collate", seed)
    begins_epoch, index = False, start
    while index < plan.total_steps:
        merged = plan.optimizer_step(index, world_size)
        if merged.epoch != order.epoch:
            order, begins_epoch = IndexOrder(plan, merged.epoch), True
        for each in plan.work(range(index, merged.done), virtual_workers):
            ids = order.ids(plan.step(each.step).step_in_epoch, each.virtual_worker)
            begin = each.number * (plan.spec.micro_batch or 0)
            part = ids[begin : begin + each.samples]
            key = int(subkeys(collate, each.step, each.virtual_worker, each.number))
            yield Request(part, subkeys(samples, merged.epoch, part), key, begins_epoch)
            begins_epoch = False
        index = merged.done


def any_request(ids: Ids) -> Request:
    """Return a request for samples whose micro-batch has no weight, so that it does not matter what is drawn for them."""
    return Request(ids, subkeys(0, ids), 0)
