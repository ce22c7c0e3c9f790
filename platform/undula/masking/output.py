"""Masks what a process prints and logs: streams in place of sys.stdout and sys.stderr, and a maker of the records of logs."""

import atexit
import logging
import os
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any, TextIO

from undula.masking.values import declare, declared_in, length_of_beginning, mask


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
    The stream has no lock, with which a signal handler or a fork could wait forever.
    """

    is_masked = True

    def __init__(self, stream: TextIO, name: str):
        self._stream, self._name = stream, name
        self._pieces: deque[str] = deque()
        """Pieces of the last line, which is not complete."""

    def write(self, text: str) -> int:
        end = max(text.rfind("\n"), text.rfind("\r")) + 1  # a progress bar writes over itself
        if end:
            self._stream.write(mask(self._taken() + text[:end]))
        if text[end:]:
            self._pieces.append(text[end:])
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        text = self._taken()
        kept = length_of_beginning(text)
        if kept:
            self._pieces.appendleft(text[-kept:])
        if len(text) > kept:
            self._stream.write(mask(text[: len(text) - kept]))
        self._stream.flush()

    def release(self) -> None:
        """Write what is left at the end of the process."""
        if rest := self._taken():
            self._stream.write(mask(rest))

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
