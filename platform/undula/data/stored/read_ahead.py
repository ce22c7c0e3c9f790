"""Reading ahead: a generator that runs in a thread, one item ahead of its consumer."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import Generic, TypeVar

CLOSE_WITHIN_S = 10.0
"""Maximum time in seconds to wait for the read-ahead thread to end."""
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
