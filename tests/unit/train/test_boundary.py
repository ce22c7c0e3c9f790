"""Tests of the boundary between two steps."""

from types import SimpleNamespace
from typing import Any

from undula.recovery.worker_state import WorkerState
from undula.train.boundary import StepBoundary


class Snapshots:
    """Snapshots of a rank whose node has no memory for the one in progress, which only `wait` finds out."""

    lacks_piece = is_sending = False

    def wait(self) -> None:
        self.lacks_piece = True

    def wants(self, step_s: float) -> tuple[bool, bool]:
        return True, False


def test_the_ranks_agree_on_a_step_only_after_each_has_stored_the_last_snapshot() -> None:
    """Otherwise a fast rank could replace the last complete state while a slow one has not stored the newer one yet."""
    context: Any = SimpleNamespace(
        snapshots=Snapshots(),
        step_s=0.1,
        setup=SimpleNamespace(worker=WorkerState()),
        checkpoints=SimpleNamespace(saving_step=None, has_finished_here=False),
    )
    wants = StepBoundary(context).wants()
    assert wants.snapshots
    assert wants.lacks_memory
