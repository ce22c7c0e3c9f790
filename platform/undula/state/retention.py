"""Retention policy for checkpoints. Pure."""

from collections.abc import Sequence


def superseded(checkpoints: Sequence[tuple[int, int, str]], keep: int) -> list[str]:
    """Return the names of the checkpoints that are not among the `keep` newest, oldest first.

    Args:
        checkpoints: (step, attempt, name) of each checkpoint.
        keep: number of checkpoints to keep.
    """
    newest_last = sorted(checkpoints)
    return [name for _, _, name in newest_last[: max(len(newest_last) - keep, 0)]]
