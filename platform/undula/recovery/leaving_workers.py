"""The workers of a run that are in no group any more, as actors of Ray."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from typing import Any

import ray
from ray.exceptions import RayError
from torch import Tensor

from undula.recovery.moves import Part
from undula.recovery.offers import Common, Described
from undula.recovery.part_server import PartAddress, PartClient
from undula.recovery.worker_state import LostLeaverError

LANES = 2
"""Number of connections to a worker, so that it packs parts while others are on their way."""
UNDER_WAY = 3
"""Maximum number of requests for parts whose answers a rank may hold at a time."""
ANSWER_S = 5.0
"""Maximum seconds to wait for the description of what workers hold. The others are left out."""
LOST_S = 60.0
"""Maximum seconds to wait for a worker that has described what it holds. One that is suspended would otherwise hold up the ranks until they
count as hung."""


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

    def answers(self, plan_digest: str) -> list[tuple[str, Described]]:
        """Ask all of them for the states of a plan that they hold, and return their names and answers."""
        asked = {name: actor.offered.remote(plan_digest) for name, actor in self._actors().items()}
        done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
        found = []
        for name, answer in asked.items():
            try:
                pairs, names = ray.get(answer) if answer in done else ([], {})
            except RayError:
                continue
            found += [(name, (pairs, names))] if pairs else []
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
        numbers = {number for number, _ in asked}
        served = {number: self._actor(number).serve_parts.remote() for number in numbers}
        addresses = {number: _answer(address) for number, address in served.items()}
        lanes = [_Lane(addresses) for _ in range(LANES)]
        under_way: deque[Future[Tensor]] = deque()
        try:
            for (number, parts), lane in zip(asked, cycle(lanes)):
                if len(under_way) == UNDER_WAY:
                    yield _received(under_way.popleft())
                under_way.append(lane.fetch(number, parts))
            while under_way:
                yield _received(under_way.popleft())
        finally:
            for lane in lanes:
                lane.close()

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
        return ray.get(reference, timeout=LOST_S)
    except RayError as error:
        raise LostLeaverError(f"a worker that was leaving was lost: {error}") from error


def _received(parts: "Future[Tensor]") -> Tensor:
    try:
        return parts.result()
    except OSError as error:
        raise LostLeaverError(f"a worker that was leaving was lost: {error}") from error


class _Lane:
    """Thread that fetches parts of the state of workers, one request after another, over a connection to each worker."""

    def __init__(self, addresses: Mapping[int, PartAddress]):
        self._addresses = addresses
        self._clients: dict[int, PartClient] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="undula-parts")

    def fetch(self, number: int, parts: Sequence[Part]) -> "Future[Tensor]":
        """Begin to fetch parts from a worker, given its number. The result raises OSError if it was lost."""
        if number not in self._clients:
            self._clients[number] = PartClient(self._addresses[number])
        return self._thread.submit(self._clients[number].fetch, parts)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
