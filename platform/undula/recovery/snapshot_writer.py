"""Takes snapshots in parallel with training, as often as is possible at 1 % of the training time."""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from undula.recovery.node_memory import RESERVED, Send, Slot, delete_former_attempts, ready_event, reserve
from undula.recovery.snapshot import META, PLACE, SLOTS, UPDATE_SLOTS, Arrangement, encoded, fixed_meta
from undula.state.pieces import RankState
from undula.state.records import StepRow

Form: TypeAlias = Mapping[str, object]
"""Places and memory layouts of a rank's pieces, and the tensors that it has nothing of, by name."""
COST = 0.01
"""Maximum share of the training time that snapshots take."""
SETTLED = 8
"""Number of snapshots after which their measured cost is reliable."""


class SnapshotWriter:
    """Takes snapshots of the state of one rank, in a thread, while the next step computes its gradients.

    The caller passes copies of what can change between two updates of the optimizer, such as buffers.

    Args:
        folder: Folder of the run in the memory of this node.
        plan_digest: Digest of the run's plan.
        attempt: Number of the attempt.
        rank: Number of this worker in its group. Ray nodes of one machine share its memory, so its number on its node would not be unique.
        every_steps: Number of steps between snapshots. By default, it is the smallest at which snapshots cost at most COST.
        most_steps: Maximum number of steps between snapshots, whatever they cost.
    """

    def __init__(
        self,
        folder: Path,
        plan_digest: str,
        attempt: int = 0,
        rank: int = 0,
        every_steps: int | None = None,
        most_steps: float = math.inf,
    ):
        self._folder = folder
        self.own = folder / str(attempt) / str(rank)
        """Folder of the slots of this rank."""
        self._plan_digest = plan_digest
        self._attempt = attempt
        self._fixed_interval, self._most_steps = every_steps, most_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="undula-snapshot")
        self._taking: Future[float] | None = None
        self._counts = False
        """Whether the snapshot in progress costs as much as later ones. The first one in a slot also takes its memory from the system."""
        self._form: Form | None = None
        self._fixed_meta = b""
        self._slots: list[Slot] = []
        self._places: dict[str, dict[str, Any]] = {}
        self._next = 0
        self._cost_s = 0.0
        self._held_up_s = 0.0
        self._step_s = 0.0
        self._steps_since: int | None = None
        self._taken = 0
        self.problem: str | None = None
        """Reason why no snapshots can be taken; None if they can."""

    @property
    def bytes(self) -> int:
        """Number of bytes that the snapshots of this rank take in the memory of its node."""
        return sum(slot.bytes for slot in self._slots)

    @property
    def every_steps(self) -> int:
        """Number of steps between two snapshots."""
        if self._fixed_interval is not None:
            return self._fixed_interval
        if not self._cost_s or not self._step_s:
            return 1
        return int(min(max(math.ceil(self._cost_s / (COST * self._step_s)), 1), self._most_steps))

    def cost(self) -> tuple[int, float] | None:
        """Return the number of steps between two snapshots and the share of time that they cost; None before SETTLED snapshots."""
        if self._taken < SETTLED or not self._step_s:
            return None
        return self.every_steps, self._cost_s / (self.every_steps * self._step_s)

    def is_due(self, step_s: float, always: bool = False) -> bool:
        """Return whether to take a snapshot after a step. Call this once per step.

        Args:
            step_s: Duration of the step in seconds.
            always: Whether one is needed after each step, unless the interval is given.
        """
        self._step_s = 0.9 * self._step_s + 0.1 * step_s if self._step_s else step_s
        if self._steps_since is not None:
            self._steps_since += 1
        every_steps = 1 if always and self._fixed_interval is None else self.every_steps
        return self.problem is None and (self._steps_since is None or self._steps_since >= every_steps)

    def begin(
        self,
        step: int,
        held: RankState,
        copies: Mapping[str, Tensor],
        rows: Sequence[StepRow],
        send: Send | None = None,
        waited_s: float = 0.0,
        attempt: int | None = None,
        sent: RankState | None = None,
    ) -> None:
        """Start copying the state. Call `wait()` before the tensors change.

        Args:
            step: Number of steps that the state includes.
            held: What this rank stores of the state.
            copies: Copies of the tensors that change before the next `wait()`, by name.
            rows: Rows of the ledger that may not have reached storage.
            send: Callback for the thread that receives the meta and the bytes of the snapshot. It must copy the bytes before it returns.
            waited_s: Seconds for which the training has waited for these arguments.
            attempt: Number of the attempt that has committed the last of the steps; by default this one.
            sent: What `send` gets, which are the first pieces of `held`; by default all of them.
        """
        self.wait()
        began = time.perf_counter() - waited_s
        self._steps_since = 0
        number, self._next = self._next, 1 - self._next
        if self.problem or not self._lay_out(held):
            return
        slot = self._slots[number]
        self._counts = slot.has_memory
        age = self._attempt if attempt is None else attempt, step
        meta = encoded(self._fixed_meta, age, rows, held.values)
        sources = list({**{name: piece.tensor for name, piece in held.pieces.items()}, **copies}.values())
        self._taking = self._thread.submit(slot.write, sources, ready_event(sources), meta)
        if send:
            part = Arrangement((sent or held).pieces)
            fixed = fixed_meta(self._plan_digest, part, (sent or held).others)
            self._thread.submit(slot.give, send, encoded(fixed, age, rows, held.values), part.bytes)
        self._held_up_s += time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the snapshot in progress is complete."""
        if self._taking:
            taking, self._taking = self._taking, None
            began = time.perf_counter()
            try:
                cost_s = taking.result()
            except OSError as error:
                self.problem = str(error)
                return
            cost_s += self._held_up_s + time.perf_counter() - began
            self._held_up_s = 0.0
            self._taken += 1
            if self._counts:
                self._cost_s = 0.7 * self._cost_s + 0.3 * cost_s if self._cost_s else cost_s

    def delete_former_attempts(self) -> None:
        """Delete the snapshots of former attempts on this node, before the next snapshot is taken."""
        self._thread.submit(delete_former_attempts, self.own.parent)

    def discard(self) -> None:
        """Stop taking snapshots, and delete the last one, of which a rank could not store its part. The one before stays."""
        self.close()
        (self.own / PLACE).unlink(missing_ok=True)
        for name in UPDATE_SLOTS:
            shutil.rmtree(self.own / name, ignore_errors=True)
        for number, name in enumerate(SLOTS):
            (self.own / name / RESERVED).unlink(missing_ok=True)
            if number != self._next or not (self.own / name / META).exists():
                shutil.rmtree(self.own / name, ignore_errors=True)
        for folder in (self.own, self.own.parent):
            with suppress(OSError):  # there is another snapshot in it
                folder.rmdir()

    def delete_own(self) -> None:
        """Stop taking snapshots, and free the memory of those of this rank and of former attempts."""
        self.close()
        shutil.rmtree(self.own, ignore_errors=True)
        with suppress(OSError):  # other ranks still take snapshots, or there is none
            delete_former_attempts(self.own.parent)
            self.own.parent.rmdir()

    def delete(self) -> None:
        """Stop taking snapshots, and free the memory of all snapshots of the run on this node."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Stop taking snapshots, and leave the existing ones for a later group."""
        self.wait()
        self._thread.shutdown()
        self._slots = []

    def _lay_out(self, held: RankState) -> bool:
        """Prepare the slots for a state. If that fails, set `problem` and return False."""
        former, self._form = self._form, _form(held)
        if self._form == former:
            return True
        arrangement = Arrangement(held.pieces)
        self._fixed_meta = fixed_meta(self._plan_digest, arrangement, held.others)
        if self._slots and arrangement.places == self._places:
            return (
                True  # the slots fit the new state too, as with an optimizer that counts steps in its parameter groups
            )
        self._places, self._slots = arrangement.places, []
        try:
            self.problem = reserve(self.own, dict.fromkeys(SLOTS, arrangement.bytes))
        except OSError as error:
            self.problem = str(error)
        if self.problem:
            return False
        self._slots = [Slot(self.own / name, arrangement) for name in SLOTS]
        return True


def _form(held: RankState) -> Form:
    places = {
        name: (piece.shape, piece.offsets, piece.is_replicated, *_layout(piece.tensor))
        for name, piece in held.pieces.items()
    }
    return {**held.others, **places}


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()
