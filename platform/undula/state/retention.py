"""Which checkpoints may go. Pure."""

from collections.abc import Sequence


def superseded(checkpoints: Sequence[tuple[int, int, str]], keep: int) -> list[str]:
    """Names of the checkpoints, given as (step, attempt, name), that are not among the `keep` newest, oldest first."""
    newest_last = sorted(checkpoints)
    return [name for _, _, name in newest_last[: max(len(newest_last) - keep, 0)]]
