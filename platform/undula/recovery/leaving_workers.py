"""The workers of a run that are in no group any more, as actors of Ray."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from undula.recovery.leavers import Common
from undula.recovery.moves import Part
from undula.recovery.offers import Answer
from undula.recovery.worker_state import LostLeaverError

UNDER_WAY = 7
"""Number of requests for parts that a rank has under way. More than in a group, because each takes longer."""
ANSWER_S = 5.0
"""Maximum seconds to wait for the description of what workers hold. The others are left out."""


class LeavingWorkers:
    """Leavers that are actors of Ray. They send what they hold to the rank that asks for it, and not by way of the head.

    Args:
        controller: Handle of the controller's actor, which has the method `leavers` of ElasticController.

    Attributes:
        names: Names of the workers that have answered rank 0. Their places in this list are their numbers.
    """

    def __init__(self, controller: Any):
        self._controller = controller
        self._known: dict[str, Any] | None = None
        self.names: list[str] = []

    def answers(self, plan_digest: str) -> list[tuple[str, list[Answer]]]:
        """Ask all of them for the states of a plan that they hold, and return their names and answers."""
        asked = {name: actor.offered.remote(plan_digest) for name, actor in self._actors().items()}
        done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
        found = []
        for name, answer in asked.items():
            try:
                answers = ray.get(answer) if answer in done else []
            except RayError:
                continue
            found += [(name, answers)] if answers else []
        return found

    def common(self, number: int) -> Common:
        """Return what all ranks take over from one of them, by its number.

        Raises:
            LostLeaverError: The worker was lost.
        """
        found: Common = _answer(self._actor(number).offered_values.remote())
        return found

    def parts(self, asked: Sequence[tuple[int, Sequence[Part]]]) -> Iterator[Tensor]:
        """Yield parts of their states, as `packed_parts` packs them.

        Args:
            asked: Number of the worker, and the parts, of each request.

        Raises:
            LostLeaverError: A worker was lost.
        """
        under_way: deque[Any] = deque()
        for number, parts in asked:
            under_way.append(self._actor(number).offered_parts.remote(parts))
            if len(under_way) == UNDER_WAY:
                yield _tensor(_answer(under_way.popleft()))
        while under_way:
            yield _tensor(_answer(under_way.popleft()))

    def _actors(self) -> dict[str, Any]:
        if self._known is None:
            self._known = _answer(self._controller.leavers.remote())
        return self._known

    def _actor(self, number: int) -> Any:
        try:
            return self._actors()[self.names[number]]
        except KeyError:
            raise LostLeaverError("a worker that was leaving has ended") from None


def _answer(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayError as error:
        raise LostLeaverError(f"a worker that was leaving was lost: {error}") from error


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(array.copy())  # Ray's arrays are read-only
