"""Progress of a rank, which its training loop records and the controller polls."""

import time
from dataclasses import dataclass, replace

STEP_TIMES_KEPT = 8
"""Number of recent steps whose durations are kept."""
STORAGE_BYTES_S = 16 * 2**20
"""Bytes per second that a rank at least reads from storage or writes to it. A slower rank counts as hung."""
MEMORY_BYTES_S = 256 * 2**20
"""Bytes per second that a rank at least copies to host memory or to another process. A slower rank counts as hung."""


@dataclass(frozen=True)
class Phase:
    """What a rank is doing, as far as it matters for the decision whether the rank hangs."""

    name: str
    may_wait: bool = False
    """Whether the rank may be waiting for other ranks, which are then at fault if the phase does not end."""
    is_brief: bool = False
    """Whether the phase takes at most a few times as long as the recent steps. Other phases have the limit of a start."""

    def unless_known(self, is_known: bool) -> "Phase":
        """Return this phase, or one that may take long if the rank has not done its work before, such as compiling for a new shape."""
        return replace(self, is_brief=self.is_brief and is_known)


START_LIMIT_S = 600.0
"""Maximum seconds without progress for a rank that starts, reads, updates, validates or saves, or computes with a new shape."""
COMPILE_S = 3600.0
"""Seconds for which a compilation may take longer than anything else before its rank counts as hung."""
LONGEST_PHASE_S = START_LIMIT_S + COMPILE_S
"""Maximum seconds without progress of a rank, apart from those for the bytes that it moves."""
COMPILING = Phase("compiling")
"""torch compiles the model."""
STARTING = Phase("starting", may_wait=True)
"""The script builds the model, and the ranks restore the state together."""
DATA = Phase("data")
"""The rank waits for samples."""
COMPUTE = Phase("compute", is_brief=True)
"""The script and the engine run a micro-batch."""
SHARDED_COMPUTE = replace(COMPUTE, may_wait=True)
"""The same for a model whose forward and backward passes contain collectives."""
REDUCE = Phase("reduce", may_wait=True, is_brief=True)
"""The collectives of a step, from the end of its last backward pass to its commit."""
SNAPSHOT = Phase("snapshot")
"""The rank waits until the snapshot in progress has copied the tensors that the optimizer is about to change."""
UPDATE = Phase("update")
"""The optimizer's step. Optimizers such as Shampoo and K-FAC compute for long in one step of many."""
BETWEEN_STEPS = Phase("between steps", may_wait=True)
"""Everything between two steps that has no phase of its own, such as the script's own code, which may contain collectives."""
VALIDATE = Phase("validate")
"""A forward pass on validation data."""
SHARDED_VALIDATE = replace(VALIDATE, may_wait=True)
"""The same for a model whose forward pass contains collectives."""
SAVE = Phase("save", may_wait=True)
"""A checkpoint blocks the training, or the ranks send their state to the controller."""
HAND_OVER = Phase("hand over")
"""The rank copies its state to host memory for the next group. Each part that is copied begins the phase anew."""
LEFT = Phase("left", may_wait=True)
"""The rank has left the group."""


@dataclass(frozen=True)
class ProgressView:
    """Progress of a rank at one moment."""

    step: int
    """Number of committed steps; -1 before the loop starts."""
    phase: Phase
    phase_s: float
    """Seconds since the rank entered the phase."""
    longest_step_s: float
    """Duration in seconds of the longest of the last STEP_TIMES_KEPT steps; 0 before the first step."""
    began: int = -1
    """Number of committed steps with which the loop started; -1 before the loop starts."""
    allowed_s: float = 0.0
    """Seconds by which the limit of the phase is longer, because of the bytes that it moves."""
    slowest_step_s: float = 0.0
    """Duration in seconds of the longest step of the group whose batches were of known kinds; 0 if there was none."""


class Progress:
    """Progress of the rank in this process. The training loop records it, and the controller polls it."""

    def __init__(self) -> None:
        self._step = self._began = -1
        self._entered: tuple[Phase, float, float] = (STARTING, time.monotonic(), 0.0)
        self._interrupted = self._entered
        self._step_times: list[float] = []
        self._slowest_step_s = 0.0

    def enter(self, phase: Phase, allowed_s: float = 0.0) -> None:
        """Record that a phase begins, or that it has come further.

        Args:
            phase: The phase.
            allowed_s: Seconds by which its limit is longer, because of the bytes that it moves.
        """
        self._entered = (phase, time.monotonic(), allowed_s)

    def begin_compiling(self) -> None:
        """Record that torch compiles something in the current phase."""
        self._interrupted = self._entered
        self.enter(COMPILING, COMPILE_S)

    def end_compiling(self) -> None:
        """Record that the phase goes on that the compilation has interrupted. It begins anew."""
        phase, _, allowed_s = self._interrupted
        self.enter(phase, allowed_s)

    def begin(self, step: int) -> None:
        """Record that the loop starts with `step` committed steps."""
        self._step = self._began = step

    def committed(self, step: int, seconds: float, is_known: bool = True) -> None:
        """Record a committed step.

        Args:
            step: Number of committed steps.
            seconds: Duration of the last one in seconds.
            is_known: Whether the group had committed a step with such batches before; otherwise, something may have been compiled.
        """
        self._step = step
        self._step_times = [*self._step_times[1 - STEP_TIMES_KEPT :], seconds]
        if is_known:
            self._slowest_step_s = max(self._slowest_step_s, seconds)

    def left_s(self, limit_s: float) -> float:
        """Return the seconds until a rank that must leave has been in its phase for too long; negative once it has.

        The limit follows the bytes that a phase moves, except those of a restore, which a later group can read again.
        """
        view = self.view()
        return limit_s + (0.0 if view.phase == STARTING else view.allowed_s) - view.phase_s

    def view(self) -> ProgressView:
        phase, since, allowed_s = self._entered
        longest_s = max(self._step_times, default=0.0)
        phase_s = time.monotonic() - since
        return ProgressView(self._step, phase, phase_s, longest_s, self._began, allowed_s, self._slowest_step_s)
