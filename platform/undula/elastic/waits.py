"""Where the training thread of this process waits for other ranks."""

import sys
import traceback
from itertools import takewhile
from types import FrameType

import torch.distributed as dist
from torch import nn

from undula.elastic.pure.deadlock import CollectiveWait
from undula.parallel.collectives import begun_by_group
from undula.parallel.reduce.exchange import await_messages, begun_transfers
from undula.train.tracebacks import is_of_user

INNER_CALLS = {
    "redistribute_local_args": "an operation with a sharded tensor",
    "meet_after_freezing": "step.batches() after a change of requires_grad",
}
"""Descriptions of what a script begins, by the name of an inner function, where that of the outer one does not tell."""


def present_wait(thread: int | None) -> CollectiveWait | None:
    """Return the collective in which a thread of this process waits, or its exchange of gradients; None if it is in none.

    Args:
        thread: Identity of the thread; None if there is none.
    """
    frame = sys._current_frames().get(thread or 0)
    frames = [found for found, _ in traceback.walk_stack(frame)] if frame else []
    own = list(takewhile(_is_of_torch, frames))
    waits = [found for found in own if str(found.f_globals["__name__"]).startswith("torch.distributed.")]
    waits += [found for found in frames[len(own) : len(own) + 1] if found.f_code is await_messages.__code__]
    if not waits or not dist.is_initialized():
        return None
    begun = {**begun_by_group(), **begun_transfers()}
    operation = waits[0].f_code.co_name
    scripts = [place for place, found in enumerate(frames) if is_of_user(found.f_code.co_filename)]
    if not scripts:
        return CollectiveWait(operation, f"{waits[-1].f_code.co_name}()", "", begun)
    line = frames[scripts[0]]
    place = f"{line.f_code.co_filename.rpartition('/')[2]}:{line.f_lineno}"
    return CollectiveWait(operation, _call(frames[: scripts[0]]), place, begun)


def _is_of_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("torch.")


def _call(frames: list[FrameType]) -> str:
    """Return the name of the call with which the script began the innermost frames, which come first."""
    names = [frame.f_code.co_name for frame in reversed(frames)]
    if isinstance(frames[-1].f_locals.get("self"), nn.Module):
        return "a forward pass"
    for name, description in INNER_CALLS.items():
        if name in names:
            return description
    return next((f"{name}()" for name in names if name != "wrapper" and not name.startswith("_")), "a collective")
