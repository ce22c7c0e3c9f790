"""Tracebacks of the user's code, carried with the exception: Ray's own text of a failure is cut."""

import re
import traceback

import torch.distributed as dist

from undula.recovery.worker_state import GroupEndedError

HOROVODS_REFUSALS = re.compile("Mismatched|not been initialized|same name as another")
"""What Horovod 0.28.1 says of a script's own mistakes (horovod/common/controller.cc, common.h)."""
_ATTRIBUTE = "undula_traceback"


def keep_traceback(error: BaseException) -> None:
    """Write the traceback into the exception, whose attributes are pickled with it; without the frame that calls the user's code."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    setattr(error, _ATTRIBUTE, "".join(traceback.format_exception(type(error), error, frames)))


def kept_traceback(error: BaseException) -> str | None:
    """What `keep_traceback` wrote; None where the exception is not of the user's code."""
    return getattr(error, _ATTRIBUTE, None)


def is_of_collective(error: BaseException) -> bool:
    """Whether another rank is what failed: torch has no exception of its own for what gloo says, and Horovod's need not be installed."""
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    is_horovod = type(error).__name__ == "HorovodInternalError" and not HOROVODS_REFUSALS.search(str(error))
    return is_gloo or is_horovod or isinstance(error, dist.DistError | GroupEndedError)
