"""Reading ahead: a generator in a thread, and rows of read tasks that this process reads itself if the tasks keep it waiting."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import Generic, Protocol, TypeVar

import pyarrow as pa

from undula.data.stored.read import WindowRead

CLOSE_WITHIN_S = 10.0
"""Maximum time in seconds to wait for the read-ahead thread to end."""
PATIENCE_S = 5.0
"""Time in seconds for which a rank waits for a read task before it reads the rows itself."""
T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Iterator that runs a generator in a thread, one item ahead of the consumer.

    Args:
        items: The generator.
        interrupt: Function that ends a wait of the generator. It is called from another thread, and can be called repeatedly.
    """

    def __init__(self, items: Generator[T, None, None], interrupt: Callable[[], None] = lambda: None):
        self._items = items
        self._interrupt = interrupt
        self._ready: Queue[T | BaseException] = Queue(maxsize=1)
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="undula-read-ahead", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        return self.next_within(None)

    def next_within(self, limit_s: float | None) -> T:
        """Return the next item.

        Raises:
            Empty: The generator did not yield it within `limit_s` seconds.
        """
        item = self._failure or self._ready.get(timeout=limit_s)
        if isinstance(item, BaseException):
            self._failure = item  # raised again by every later call
            raise item
        return item

    def close(self) -> None:
        """End the thread. A thread that is still blocked after CLOSE_WITHIN_S is abandoned."""
        self._closed.set()
        deadline = time.monotonic() + CLOSE_WITHIN_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._interrupt()
            with suppress(Empty):  # unblocks a thread that waits for space in the queue
                self._ready.get_nowait()
            self._thread.join(timeout=0.05)
        self._failure = AssertionError("the read-ahead is closed")  # any failure before holds rows in its traceback
        with suppress(Full):
            self._ready.put_nowait(self._failure)  # ends the wait of a consumer in another thread

    def _run(self) -> None:
        try:
            for item in self._items:
                self._ready.put(item)
                del item  # the next one can take long
                if self._closed.is_set():
                    return
            self._ready.put(AssertionError("the consumer took more items than the generator has"))
        except BaseException as error:
            self._ready.put(error)
        finally:
            self._items.close()


class Tasks(Protocol):
    """Read tasks that run one after another."""

    def tables(self) -> Generator[pa.Table, None, None]:
        """Yield the rows of the tasks in order. A table has rows of one task."""

    def close(self) -> None:
        """Cancel the tasks; `tables` ends, also in another thread."""


class TaskRows:
    """Rows of windows that read tasks deliver, taken in order.

    The tasks can wait for as long as the cluster is too full to run them, or until Ray has made up for a lost node. If they have delivered
    nothing for `patience_s` seconds, this process reads windows itself until the tasks, which go on with the same windows, have caught up.

    Args:
        task_rows: Number of rows of each task.
        parts: Parts of the tasks that run at the same time. The tasks are dealt to them one by one.
        patience_s: Time in seconds, by default PATIENCE_S.
    """

    def __init__(self, task_rows: Sequence[int], parts: Sequence[Tasks], patience_s: float | None = None):
        self._parts = [ReadAhead(part.tables(), part.close) for part in parts]
        self._turns = deque((number % len(parts), rows) for number, rows in enumerate(task_rows))
        """Part and number of rows of each task that has not delivered all rows yet."""
        self._rest = pa.table({})
        self._lead = 0
        """Number of rows that this process has taken and the tasks have not delivered yet."""
        self._patience_s = patience_s or PATIENCE_S

    def take(self, read: WindowRead) -> list[pa.Table]:
        """Return the next window's rows as tables."""
        parts: list[pa.Table] = []
        missing = read.num_rows
        while missing:
            try:
                self._await_rows()
            except Empty:
                self._lead += missing
                return [read()]
            parts.append(self._rest.slice(0, missing))
            missing -= parts[-1].num_rows
            self._rest = self._rest.slice(parts[-1].num_rows)
        return parts

    def close(self) -> None:
        """Cancel the tasks."""
        for part in self._parts:
            part.close()

    def _await_rows(self) -> None:
        """Wait for the next row, and drop rows that this process has read itself.

        Raises:
            Empty: The tasks have not delivered it in time, or have not caught up.
        """
        while not self._rest.num_rows or self._lead:
            if not self._rest.num_rows:
                self._rest = self._next_table(0.001 if self._lead else self._patience_s)
            dropped = min(self._lead, self._rest.num_rows)
            self._rest = self._rest.slice(dropped)
            self._lead -= dropped
            if dropped and not self._lead:
                self._patience_s *= 2  # the tasks were only slow, and reading twice would slow them further

    def _next_table(self, limit_s: float) -> pa.Table:
        number, missing = self._turns[0]
        table = self._parts[number].next_within(limit_s)
        self._turns[0] = (number, missing - table.num_rows)
        if table.num_rows == missing:
            self._turns.popleft()
        return table
