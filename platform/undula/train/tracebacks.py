"""Tracebacks of the user's code, which exceptions carry because Ray truncates its own description of a failure."""

import re
import traceback
from typing import TypeVar

import torch.distributed as dist

from undula.errors import UndulaError
from undula.masking.exceptions import mask_error
from undula.masking.values import mask
from undula.recovery.worker_state import GroupEndedError
from undula.train.left_out import note_left_out
from undula.train.shard_errors import note_shards

Refusal = TypeVar("Refusal", bound=UndulaError)
HOROVODS_REFUSALS = re.compile("Mismatched|not been initialized|same name as another")
"""Parts of the messages of Horovod 0.28.1 about mistakes of the script itself (horovod/common/controller.cc, common.h)."""
_ATTRIBUTE = "undula_traceback"
_NOT_OF_USER = re.compile(r"site-packages|/undula/|/lib/python3\.\d+/|^<frozen ")
"""Paths of files that are not the user's: installed packages, this one, and Python's own."""


def keep_traceback(error: BaseException) -> None:
    """Store the traceback as an attribute of the exception, because attributes are pickled with an exception.

    The frame that calls the user's code is left out. Secrets are masked, because Ray writes exceptions of workers to its logs.
    """
    note_left_out(error)
    note_shards(error)
    mask_error(error)
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    setattr(error, _ATTRIBUTE, mask("".join(traceback.format_exception(type(error), error, frames))))


def kept_traceback(error: BaseException) -> str | None:
    """Return the traceback that `keep_traceback` stored; None if the exception was not raised by the user's code."""
    return getattr(error, _ATTRIBUTE, None)


def is_of_user(file: str) -> bool:
    """Return whether a file of Python is the user's: none of an installed package, of this one, or of Python itself."""
    return not _NOT_OF_USER.search(file)


def place_in_script(story: str) -> str:
    """Return the last line of the user's code in a traceback, such as `train.py:12`; empty if there is none."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', story)
    own = [place for place in frames if is_of_user(place[0])]
    return f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}" if own else ""


def with_place(error: Refusal, story: str) -> Refusal:
    """Return an error with the place in the user's code at which it was raised, given its traceback."""
    place = place_in_script(story)
    return type(error)(f"{error} ({place})") if place else error


def is_of_collective(error: BaseException) -> bool:
    """Return whether a collective failed because of another rank.

    Some errors are recognized by their text or class name, because torch has no exception class for gloo's errors, and Horovod may not be
    installed.
    """
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    is_horovod = type(error).__name__ == "HorovodInternalError" and not HOROVODS_REFUSALS.search(str(error))
    return is_gloo or is_horovod or isinstance(error, dist.DistError | GroupEndedError)
