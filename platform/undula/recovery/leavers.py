"""Workers that have left their group but still hold its state: the next group gets from them what its ranks lack."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from undula.recovery.moves import Part
from undula.recovery.offers import Answer


class Leavers(Protocol):
    """Workers that are in no group, as a rank of a group that starts sees them."""

    names: list[str]
    """Names of those that have answered to rank 0, in the order of their numbers."""

    def answers(self, plan_digest: str) -> list[tuple[str, list[Answer]]]:
        """Ask all of them for the states of a plan that they hold, and return their names and answers."""

    def common(self, number: int) -> Any:
        """Return the values, the rows and the table of the state that one of them holds."""

    def parts(self, asked: Sequence[tuple[int, Sequence[Part]]]) -> Iterator[Tensor]:
        """Yield parts of their states, as `packed_parts` packs them.

        Args:
            asked: Number of the worker, and the parts, of each request.
        """
