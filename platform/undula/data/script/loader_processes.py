"""torch's DataLoader over micro-batches. Its processes outlive worker groups, end with their rank, and are replaced if they are lost."""

import copy
import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from undula.data.script.items import Items, Request, kept_generators, on_host
from undula.errors import UsageError
from undula.masking.output import mask_output
from undula.masking.values import declare, declared

PRELOADED = ["ray.cloudpickle", "undula.data.script.loader_processes"]
"""Modules that the fork server imports once, for all loader processes."""
MOST_LOSSES = 3
"""Number of times in a row that loader processes may be lost at the same micro-batch before the run fails."""
LOSS_LIMIT_S = 5.0
"""Maximum time in seconds between an error of a connection to a process that is being lost and the end of this process."""
Result = TypeVar("Result")
_Sent: TypeAlias = tuple[Request, bytes | None]
"""Request, and the pickled dataset for a loader process that does not have it."""


def start_fork_server(waits: bool = False) -> None:
    """Start the process from which loader processes are forked, unless it is there. Its imports take seconds.

    Args:
        waits: Whether to wait until it has imported its modules.
    """
    context = ForkServerContext()
    context.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    if waits:
        process = context.Process(target=_nothing)
        process.start()
        process.join()


def _nothing() -> None:
    """Do nothing, in a process that ends at once."""


class Loader:
    """Loads the micro-batches of a dataset, in loader processes or in this process.

    Loader processes are forked from a fork server: children of the rank itself would hold its sockets, so that other ranks would notice
    its death late. They start with the first micro-batch.

    Args:
        num_workers: Number of loader processes; with 0, this process loads the micro-batches.
    """

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._source = _Source()
        self._requests = _Requests(num_workers)
        self._context = _Context()
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None
        self._dataset: bytes | None = None
        """Pickled dataset that the loader processes have. A process that replaces a lost one gets it, too."""
        self._digest: bytes | None = None
        """Digest of this dataset; None if it has none."""
        self._loaded_here: dict[int, Any] = {}
        """Micro-batches that this process has loaded out of order, by number of samples."""
        self._losses = 0
        if num_workers:
            start_fork_server()  # it imports its modules while this process makes the model

    def begin(self, items: Items, requests: Iterable[Request]) -> None:
        """Load these micro-batches from now on. What was loaded ahead of others before is discarded.

        Args:
            items: Dataset of micro-batches.
            requests: Micro-batches to load, in order.
        """
        self._source.items = items
        self._requests.replace(requests)
        self._batches = None
        self._losses = 0
        if self._num_workers:
            self._take_dataset()
            self._with_processes(self._start)

    @property
    def begins_epoch(self) -> bool:
        """Whether the next micro-batch is the first one of an epoch, and was loaded before the epoch began."""
        return bool(self._requests.sent) and self._requests.sent[0].begins_epoch

    def renew(self) -> None:
        """Load what has not been returned again, if the dataset is not the one any more that the loader processes have.

        torch's DataLoader starts its processes anew in each epoch, with the dataset as it is then.

        Raises:
            UsageError: The dataset cannot be pickled any more.
        """
        if self._num_workers and self._take_dataset():
            self._batches = None

    def next(self) -> tuple[Request, Any]:
        """Return the next micro-batch with its request.

        Raises:
            UsageError: Loader processes were lost repeatedly at this micro-batch.
            Exception: Any exception that the dataset or the collate function raises.
        """
        batch = self._with_processes(self._load)
        self._losses = 0
        return self._requests.sent.popleft(), batch

    def load_here(self, items: Items, request: Request) -> Any:
        """Return a micro-batch of arbitrary samples that this process loads out of order.

        If there are loader processes, it is loaded from a copy of the dataset, which may not be picklable any more after its use, and only
        once for each number of samples, because the copy of a large dataset takes seconds.
        """
        if not self._num_workers:
            return items[request]
        size = len(request.ids)
        if size not in self._loaded_here:
            self._loaded_here[size] = Items.loads(self._dataset or items.dumps())[request]
        return copy.deepcopy(self._loaded_here[size])  # a script may change its batches

    def free(self) -> None:
        """Free the dataset in this process, which the next group makes anew. The loader processes stay."""
        self._source.items = None

    def close(self) -> None:
        """End the loader processes."""
        for process in self._context.started():
            process.kill()
        self._loader = self._batches = None
        self._context = _Context()

    def _start(self) -> Iterator[Any]:
        """Begin to load, in the processes of before if they are still there."""
        if self._loader is None:
            self._loader = self._make_loader()
            self._requests.dataset = self._dataset
        with on_host():  # a DataLoader draws a seed, for which its generator must be on the default device
            self._batches = iter(self._loader)
        return self._batches

    def _take_dataset(self) -> bool:
        """Send the dataset as it is now with the next requests, and return True, unless the loader processes have it."""
        items = self._source.items
        assert items is not None
        try:
            digest = items.digest()
        except Exception:  # `dumps` raises it with the fix
            digest = None
        if digest is not None and digest == self._digest:
            return False
        self._dataset, self._digest = items.dumps(), digest
        self._requests.dataset = self._dataset
        return True

    def _load(self) -> Any:
        # The script's own random numbers must not depend on which rank has loaded what.
        kept: AbstractContextManager[None] = nullcontext() if self._num_workers else kept_generators()
        with kept:
            return next(self._start() if self._batches is None else self._batches)

    def _make_loader(self) -> DataLoader[Any]:
        in_processes: dict[str, Any] = {
            "multiprocessing_context": self._context,
            "persistent_workers": True,
            "worker_init_fn": partial(_begin, declared()),
        }
        return DataLoader(
            self._source,
            batch_size=None,  # an item is a micro-batch
            sampler=self._requests,
            collate_fn=_unchanged,
            num_workers=self._num_workers,
            generator=torch.Generator(),  # otherwise it would draw from that of the script
            **in_processes if self._num_workers else {},
        )

    def _with_processes(self, act: Callable[[], Result]) -> Result:
        """Return the result of `act`, for which lost processes are replaced."""
        while True:
            if self._context.has_lost_process():
                self._replace_processes()
            try:
                return act()
            except Exception as error:
                # A process that is killed can close its connections before it counts as ended.
                if not self._context.has_lost_process(LOSS_LIMIT_S if isinstance(error, OSError | EOFError) else 0.0):
                    raise

    def _replace_processes(self) -> None:
        exits = sorted({process.exitcode for process in self._context.started() if process.exitcode is not None})
        self._losses += 1
        if self._losses > MOST_LOSSES:
            raise UsageError(
                f"loader processes ended {self._losses} times in a row with exit status {exits[0]} while they loaded the samples "
                f"{self._requests.open_ids()}; look for a crash in the dataset's code, or for too little memory, also in /dev/shm"
            )
        logging.getLogger("undula").warning("loader processes ended with exit status %s; starting new ones", exits[0])
        self.close()


class _Source(Dataset[Any]):
    """Dataset of a DataLoader, which does not allow to set another one. A loader process gets it with a request."""

    def __init__(self) -> None:
        self.items: Items | None = None

    def __getitem__(self, sent: "_Sent") -> Any:
        request, dataset = sent
        if dataset is not None:
            self.items = Items.loads(dataset)
        assert self.items is not None, "nothing is loaded before `begin` or after `free`"
        return self.items[request]

    def __getstate__(self) -> dict[str, Any]:
        return {"items": None}


class _Requests:
    """Requests for a DataLoader's sampler. Those without an answer are sent again when the DataLoader starts anew.

    A DataLoader passes its requests to its processes in turn, so that each gets one of the first ones after it starts anew.
    """

    def __init__(self, num_workers: int) -> None:
        self.sent: deque[Request] = deque()
        """Requests whose micro-batches have not been returned, in order."""
        self.dataset: bytes | None = None
        """Pickled dataset that some processes do not have yet."""
        self._num_workers = num_workers
        self._rest: Iterator[Request] = iter(())

    def replace(self, requests: Iterable[Request]) -> None:
        self.sent.clear()
        self._rest = iter(requests)

    def open_ids(self) -> list[int]:
        """Return the ids of the samples of all requests without an answer."""
        return [index for request in self.sent for index in request.ids.tolist()]

    def __iter__(self) -> Iterator[_Sent]:
        self._rest = chain(tuple(self.sent), self._rest)
        self.sent.clear()
        for number, request in enumerate(self._rest):
            self.sent.append(request)
            if number == self._num_workers:
                self.dataset = None
            yield request, self.dataset


class _Context(ForkServerContext):
    """Context that knows the processes that it has made, which a DataLoader does not publish."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[ForkServerProcess] = []

    def Process(self, *arguments: Any, **more: Any) -> ForkServerProcess:  # type: ignore[override]
        self._made.append(ForkServerProcess(*arguments, **more))
        return self._made[-1]

    def started(self) -> list[ForkServerProcess]:
        return [process for process in self._made if process.pid is not None]

    def has_lost_process(self, limit_s: float = 0.0) -> bool:
        """Return whether a process has ended, or ends within `limit_s` seconds."""
        sentinels = [process.sentinel for process in self.started()]
        return bool(sentinels and wait(sentinels, limit_s))


def _unchanged(batch: Any) -> Any:
    return batch


def _begin(secrets: Mapping[str, str], worker_id: int) -> None:
    """Mask the rank's secrets in what this loader process prints, and end it as soon as the rank ends.

    torch looks only for the end of the fork server, and every 5 s.
    """
    declare(secrets)
    mask_output()
    threading.Thread(target=_await_end_of_rank, daemon=True).start()


def _await_end_of_rank() -> None:
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(1)
