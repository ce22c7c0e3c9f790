"""Workers that have left their group but still hold its state: the next group gets from them what its ranks lack."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from undula.recovery.moves import Part
from undula.recovery.offers import Described
from undula.state.pieces import Table
from undula.state.records import StepRow

Common: TypeAlias = tuple[Mapping[str, Any], tuple[StepRow, ...], Table]
"""What all ranks take over from one that has committed a state: its values, its rows of the ledger, and the table of its tensors."""


class Leavers(Protocol):
    """Workers that are in no group any more, as a rank of a group that starts sees them.

    All methods raise LostLeaverError if a worker was lost.
    """

    names: list[str]
    """Names of the workers that have answered rank 0. Their places in this list are their numbers."""

    def answers(self, plan_digest: str) -> list[tuple[str, Described]]:
        """Ask all of them for the states of a plan that they hold, and return their names and answers."""

    def common(self, number: int) -> Common:
        """Return what all ranks take over from one of them, by its number."""

    def parts(self, asked: Sequence[tuple[int, Sequence[Part]]]) -> Iterator[Tensor]:
        """Yield parts of their states, as `packed_parts` packs them.

        Args:
            asked: Number of the worker, and the parts, of each request.
        """
