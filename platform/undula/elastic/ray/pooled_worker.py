"""Worker process in the pool of a run, and the answers of several such workers."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from undula.elastic.ray.actor import Departure, WorkerMetadata

LEAVE_TIMEOUT_S = 26.0
"""Maximum seconds without an answer from a worker that was asked to end everything that its group has left running."""
LEAVE_PATIENCE_S = LEAVE_TIMEOUT_S / 2
"""Maximum seconds in which a leaving worker may make no progress, for example while a rendezvous fails."""


@dataclass
class PooledWorker:
    """Worker process in a pool, ready or still starting."""

    actor: Any
    node: str
    """Id of the node on which the worker runs."""
    preparing: Any
    """Reference to the result of `ElasticWorker.prepare`."""
    started: float
    """Start time on the monotonic clock, in seconds."""
    metadata: WorkerMetadata | None = None
    """Address of the worker and identity of its process; None until it is ready."""
    in_group: bool = False
    has_trained: bool = False
    """Whether the worker has been in a group and may therefore hold the run's state."""
    holds_state: bool = False
    """Whether the worker was in the newest group that has committed a step, so that it may hold the newest state."""
    place: tuple[int, int] | None = None
    """Rank of the worker in its last group, and number of ranks of this group; None before its first group."""
    leaving: Any = None
    """Reference to the result of `ElasticWorker.leave_group`; None unless the worker is leaving its group."""
    asked_at: float = 0.0
    """Time of that call on the monotonic clock, in seconds."""
    left_at: float = 0.0
    """Time at which the worker left its last group, on the monotonic clock, in seconds."""
    is_refused: bool = False
    """Whether the head had no room for the worker's state."""
    export: Any = None
    """Reference to the result of `ElasticWorker.export_state`; None unless the state was requested because the node will be removed."""

    @property
    def id(self) -> str:
        return str(self.actor._actor_id.hex())

    def leave(self) -> None:
        """Begin to leave the group, or go on with it."""
        self.leaving, self.asked_at = self.actor.leave_group.remote(LEAVE_PATIENCE_S), time.monotonic()


def responding_in_time(answers: dict[Any, PooledWorker], timeouts_s: Mapping[str, float]) -> list[PooledWorker]:
    """Return the workers that answer. The wait ends when the time limits of all workers that have not answered are over."""
    began, responding = time.monotonic(), []
    while answers:
        left = max(timeouts_s[worker.id] for worker in answers.values()) - (time.monotonic() - began)
        done, _ = ray.wait(list(answers), num_returns=1, timeout=max(left, 0))
        if not done:
            break
        worker = answers.pop(done[0])
        responding += [worker] if _is_accepted(done[0]) else []
    return responding


def accepted(answers: Mapping[Any, PooledWorker], timeout_s: float) -> list[PooledWorker]:
    """Return the workers whose answer arrives in time and is neither False nor an error."""
    if not answers:
        return []
    done, _ = ray.wait(list(answers), num_returns=len(answers), timeout=timeout_s)
    return [answers[answer] for answer in done if _is_accepted(answer)]


def departure_of(answer: Any) -> Departure:
    """Return the result of `ElasticWorker.leave_group`. A worker whose process has ended cannot be used again."""
    try:
        departure: Departure = ray.get(answer)
    except RayError:
        return "unusable"
    return departure


def _is_accepted(answer: Any) -> bool:
    try:
        return ray.get(answer) is not False
    except RayError:
        return False
