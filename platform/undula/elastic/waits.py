"""Where the training thread of this process waits for other ranks."""

import sys
import traceback
from types import FrameType

import torch.distributed as dist
from torch import nn

from undula.elastic.pure.deadlock import CollectiveWait
from undula.parallel.collectives import begun_by_group
from undula.train.tracebacks import is_of_user


def present_wait(thread: int | None) -> CollectiveWait | None:
    """Return the collective in which a thread of this process waits; None if it is not in one.

    Args:
        thread: Identity of the thread; None if there is none.
    """
    frame = sys._current_frames().get(thread or 0)
    frames = [found for found, _ in traceback.walk_stack(frame)] if frame else []
    names = [str(found.f_globals.get("__name__")) for found in frames]
    inner = next((place for place, name in enumerate(names) if not name.startswith("torch.")), len(names))
    own = [found for found, name in zip(frames[:inner], names, strict=False) if name.startswith("torch.distributed.")]
    if not own or not dist.is_initialized():
        return None
    scripts = [place for place, found in enumerate(frames) if is_of_user(found.f_code.co_filename)]
    if not scripts:
        return CollectiveWait(own[0].f_code.co_name, f"{own[-1].f_code.co_name}()", "", begun_by_group())
    line = frames[scripts[0]]
    place = f"{line.f_code.co_filename.rpartition('/')[2]}:{line.f_lineno}"
    return CollectiveWait(own[0].f_code.co_name, _call(frames[: scripts[0]]), place, begun_by_group())


def _call(frames: list[FrameType]) -> str:
    """Return the name of the call with which the script began the innermost frames, which come first."""
    names = [frame.f_code.co_name for frame in reversed(frames)]
    if isinstance(frames[-1].f_locals.get("self"), nn.Module):
        return "a forward pass"
    return next((f"{name}()" for name in names if name != "wrapper" and not name.startswith("_")), "a collective")
