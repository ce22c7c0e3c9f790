"""Retention policy for checkpoints."""

from collections.abc import Sequence


def superseded(checkpoints: Sequence[tuple[int, int, str]], keep: int) -> list[str]:
    """Return the names of the checkpoints that are not among the `keep` newest, oldest first.

    Args:
        checkpoints: Tuple (attempt, step, name) of each checkpoint.
        keep: Number of checkpoints to keep.
    """
    newest_last = sorted(checkpoints)
    return [name for _, _, name in newest_last[: max(len(newest_last) - keep, 0)]]
