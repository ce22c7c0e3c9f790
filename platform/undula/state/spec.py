"""Specification of a job's checkpoints and snapshots.

Also here: room that the checkpoints of a run take in its folder. Pure.
"""

from typing import Annotated

from annotated_types import Ge, Gt
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT
from undula.state.goals import GoalSpec


def lack_of_room(spec: "CheckpointSpec", url: str, checkpoint_bytes: int, free_bytes: float) -> str | None:
    """Return that the checkpoints of a run do not fit into its folder, as a sentence with the fix; None if they fit.

    Args:
        spec: Number of checkpoints that the run keeps. It writes one more before it deletes the oldest.
        url: Folder of the run or of its runs.
        checkpoint_bytes: Size of a checkpoint.
        free_bytes: Free space of the folder, with what checkpoints of the run take now.
    """
    most = spec.keep + 1 + (spec.keep_best is not None)
    if most * checkpoint_bytes <= free_bytes:
        return None
    return (
        f"the run holds up to {most} checkpoints of {size(checkpoint_bytes)} at a time, and {url} has {size(free_bytes)} free; make room "
        "there, set another folder with runs, or lower checkpoint.keep"
    )


def size(num_bytes: float) -> str:
    """Return a number of bytes as text, such as `4.2 kB`, `12.4 MB` or `3.20 GB`."""
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.1f} kB"
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


@checked_dataclass(frozen=True, config=STRICT)
class CheckpointSpec:
    """Interval of checkpoints and snapshots, and the number of checkpoints to keep."""

    every_steps: Annotated[int, Gt(0)] = 100
    """Number of steps between checkpoints. The run also takes a checkpoint at its end. If a checkpoint is due while another one is still
    being written, it begins once that has ended."""
    snapshot_every_steps: Annotated[int, Ge(0)] | None = None
    """Number of steps between snapshots in the memory of the workers' nodes, from which a run resumes after it has lost all workers. By
    default, the interval is chosen so that snapshots take less than 1 % of the time; 0 disables snapshots."""
    keep: Annotated[int, Gt(0)] = 2
    """Number of newest checkpoints to keep."""
    keep_best: GoalSpec | None = None
    """Mean of the validations whose best checkpoint is kept as well: `metric` and `mode`. The run writes a checkpoint after each validation
    with a new best value, and waits for it, so that the loss of a worker cannot cost it. If the storage fails, it tries again for half a
    minute. By default, only the newest checkpoints are kept."""
    max_non_finite_steps: Annotated[int, Gt(0)] | None = 20
    """Maximum number of steps in a row with a gradient that is not finite; with one more, the run fails. No checkpoint is written after
    such a step, so that the last one has finite weights. `null` sets no maximum. Steps that precision.compute=fp16 skips do not count."""
