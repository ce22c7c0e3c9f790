"""Masks what a process prints and logs: streams in place of sys.stdout and sys.stderr, and a maker of the records of logs."""

import atexit
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any, TextIO

from undula.masking.values import declare, declared_in, length_to_show, mask, mask_part

CONTEXT_CHARS = 300
"""Maximum number of characters of a line, shown already, by which the shape of what follows in the line is known, such as `password=`."""
WAIT_S = 1.0
"""Maximum time in seconds for which a thread waits for another one that writes. It then writes as well."""


def mask_output() -> None:
    """Mask what this process prints and logs from now on.

    Output that does not come through Python's streams, such as that of a program that this process starts, is not masked.
    """
    declare(declared_in(os.environ))
    _mask_records()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not hasattr(stream, "is_masked"):
            masked = MaskedStream(stream, name)
            setattr(sys, name, masked)
            atexit.register(masked.release)


@cache
def _mask_records() -> None:
    """Mask the records of all logs, because a handler may write to a file, or may have got a stream before it was masked."""
    make = logging.getLogRecordFactory()

    def masked_record(*args: Any, **more: Any) -> logging.LogRecord:
        record = make(*args, **more)
        with suppress(Exception):  # the arguments do not fit the message, which the handler reports
            record.msg, record.args = _masked_message(record)
        if record.exc_info and record.exc_info[1] is not None:
            story = logging.Formatter().formatException(record.exc_info)
            if (shown := mask(story)) != story:
                record.exc_text = shown
        return record

    logging.setLogRecordFactory(masked_record)


def _masked_message(record: logging.LogRecord) -> tuple[str, Any]:
    """Return the message of a record and its arguments, which are in the message if there was a secret in it."""
    text = record.getMessage()
    shown = mask(text)
    return (record.msg, record.args) if shown == text else (shown, ())


class MaskedStream:
    """Stream that masks each line. What is printed in pieces is masked as one line.

    A line is written when it is complete, and its beginning when the stream is flushed, except for an end with which a secret may begin.
    One thread writes at a time, or an end that it keeps back could be written after what follows. A thread waits only for a time, because
    the other one may not exist any more, in a fork, or may itself wait for this one. A signal handler does not wait for its own thread.
    """

    is_masked = True

    def __init__(self, stream: TextIO, name: str):
        self._stream, self._name = stream, name
        self._pieces: deque[str] = deque()
        """Pieces of text that have not been written."""
        self._line = ""
        """Text of the last line, not masked, that has been written."""
        self._is_open = False
        """Whether this text ends in a secret."""
        self._lock, self._process = threading.RLock(), os.getpid()

    def write(self, text: str) -> int:
        if text:
            self._pieces.append(text)
        if "\n" in text or "\r" in text:
            self._show(_length_of_lines)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._show(length_to_show)
        self._stream.flush()

    def release(self) -> None:
        """Write what is left at the end of the process."""
        self._show(len)

    def _show(self, length: Callable[[str], int]) -> None:
        """Write the beginning of the text that has not been written.

        Args:
            length: Function that returns the length of this beginning, given the text.
        """
        if self._process != os.getpid():  # in a fork, where the thread that has the lock may be missing
            self._lock, self._process = threading.RLock(), os.getpid()
        lock = self._lock
        is_alone = lock.acquire(timeout=WAIT_S)
        try:
            text = self._taken()
            count = length(text)
            if text[count:]:
                self._pieces.appendleft(text[count:])
            if count:
                line = self._line + text
                shown, self._is_open = mask_part(line, len(self._line), len(line) - len(text) + count, self._is_open)
                self._note(line[: len(line) - len(text) + count])
                self._stream.write(shown)
        finally:
            if is_alone:
                lock.release()

    def _note(self, line: str) -> None:
        """Note the end of what is written as the beginning of a line, unless the line is complete."""
        end = _length_of_lines(line)
        self._is_open = self._is_open and end < len(line)
        self._line = line[max(end, len(line) - CONTEXT_CHARS) :]

    def _taken(self) -> str:
        pieces = []
        while self._pieces:
            pieces.append(self._pieces.popleft())
        return "".join(pieces)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _stream_of_process, (
            self._name,
        )  # an object of the script may hold the stream and go to another process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _stream_of_process(name: str) -> Any:
    return getattr(sys, name)


def _length_of_lines(text: str) -> int:
    """Return the length of the complete lines in a text. A progress bar writes over its line."""
    return max(text.rfind("\n"), text.rfind("\r")) + 1
