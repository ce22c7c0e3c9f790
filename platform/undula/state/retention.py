"""Retention policy for checkpoints."""

from collections.abc import Sequence


def superseded(checkpoints: Sequence[tuple[int, int, str]], keep: int, best: str | None = None) -> list[str]:
    """Return the names of the checkpoints that are neither the best one nor among the `keep` newest, oldest first.

    Args:
        checkpoints: Tuple (attempt, step, name) of each checkpoint.
        keep: Number of newest checkpoints to keep.
        best: Name of the best checkpoint; None if it is not kept.
    """
    newest_last = sorted(checkpoints)
    return [name for _, _, name in newest_last[: max(len(newest_last) - keep, 0)] if name != best]
