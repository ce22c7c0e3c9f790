"""Decision whether to start another worker group after a failure, and descriptions of failures."""

import re
from collections.abc import Mapping

import torch
from ray.train import WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, TrainingFailedError

from undula.errors import CheckpointError, StorageError, SupersededError, UndulaError, UsageError
from undula.train.shard_errors import is_of_shards
from undula.train.tracebacks import is_of_collective, kept_traceback, place_in_script, with_place

BUGS = (
    *(ArithmeticError, AssertionError, AttributeError, FileNotFoundError, ImportError, LookupError, NameError),
    NotImplementedError,
    *(SyntaxError, TypeError, ValueError, UndulaError),
)
"""Types of exceptions that the same code would raise again in another attempt."""
STORAGE_FAILURES = 60
"""Maximum number of storage failures without a committed step between them. With the pauses, they take half an hour."""
LONGEST_PAUSE_S = 30.0
"""Maximum pause in seconds after a storage failure. The pause doubles with each failure until it reaches this value."""

LOSSES = (
    (
        "NODE_OUT_OF_MEMORY|running low on memory",
        "out of memory: Ray ended the process because its node ran low on memory",
    ),
    ("node (has )?died|node is dead", "its node was lost"),
    ("worker process has died", "its process crashed or was killed, perhaps by the system because memory ran out"),
)
"""Patterns of Ray's messages about a lost worker, each with the description that replaces the message."""


LOSSES_WITHOUT_NEWS = 10
"""Number of losses of workers in a row, between which the run comes no further than it was before, that a run survives."""


class NotEnoughWorkersError(WorkerGroupStartupFailedError):
    """Error that fewer workers are left than the group needs. It does not count as a failure, and the run waits for more workers."""


class RetryUnlessBug(DefaultFailurePolicy):
    """Failure policy that retries up to max_failures times, but not after an error that every attempt would repeat.

    Exceptions of the user's code count over the whole run; before the first step, one of them is retried at most. Lost workers count only
    until the next committed step, because a cluster of spot nodes loses many workers, unless the run comes no further than before for
    LOSSES_WITHOUT_NEWS times in a row, as if the script ends its process at a certain step. Storage failures have a separate limit once the
    run has committed a step: a group that trains survives an outage of the storage, so a group that starts during an outage should survive
    it too.
    """

    def __init__(self, failure_config: FailureConfig):
        super().__init__(failure_config)
        self.has_stepped = False
        """Whether the controller has seen a committed step since the last failure."""
        self._furthest = -1
        """Largest number of committed steps that the controller has seen."""
        self._losses_without_news = 0
        self.waits_for_storage = False
        """Whether the last failure was one of the storage, after which the run tries again for longer than after others."""
        self._has_ever_stepped = False
        self._exceptions = self._losses = self._storage_failures = 0
        self._pause_s = 0.0

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        if is_waiting(training_failed_error):
            return FailureDecision.RETRY
        if isinstance(training_failed_error, PreemptionError):
            return super().make_decision(training_failed_error)
        if not self._is_retryable_error(training_failed_error) or is_bug(training_failed_error):
            return FailureDecision.RAISE
        has_stepped, self.has_stepped = self.has_stepped, False
        self._has_ever_stepped |= has_stepped
        limit = self.failure_config.max_failures
        self.waits_for_storage = self._has_ever_stepped and limit != 0 and is_of_storage(training_failed_error)
        if self.waits_for_storage:
            self._storage_failures = 1 if has_stepped else self._storage_failures + 1
            self._pause_s = min(2.0**self._storage_failures, LONGEST_PAUSE_S)
            is_over = self._storage_failures > STORAGE_FAILURES
        elif is_exception(training_failed_error):
            self._exceptions += 1
            # Before the first step, an exception is hardly ever one that passes.
            is_over = self._exceptions > (limit if self._has_ever_stepped else min(limit, 1))
        else:
            self._losses = 1 if has_stepped else self._losses + 1
            self._losses_without_news += 1
            is_over = self._losses > limit or self._losses_without_news > max(LOSSES_WITHOUT_NEWS, limit)
        return FailureDecision.RAISE if limit >= 0 and is_over else FailureDecision.RETRY

    def observe(self, step: int) -> None:
        """Record that the group has committed a step, after which the run has `step` of them."""
        self.has_stepped = True
        if step > self._furthest:
            self._furthest, self._losses_without_news = step, 0

    def take_pause_s(self) -> float:
        """Return the seconds to wait before the next group starts. A second call returns 0."""
        pause_s, self._pause_s = self._pause_s, 0.0
        return pause_s


def refusal_of(error: BaseException) -> UndulaError | None:
    """Return the error for the user because of which training has ended; None if there is another reason."""
    if isinstance(error, ControllerError):
        return error.controller_failure if isinstance(error.controller_failure, UndulaError) else None
    failures = error.worker_failures if isinstance(error, WorkerGroupError) else {}
    for _, failure in sorted(failures.items()):
        if isinstance(failure, UsageError | CheckpointError):
            return with_place(failure, kept_traceback(failure) or "")
    return None


def is_superseded(error: BaseException) -> bool:
    """Return whether training failed because a newer attempt of the run exists, which may be training."""
    failures = error.worker_failures.values() if isinstance(error, WorkerGroupError) else ()
    return any(isinstance(failure, SupersededError) for failure in failures)


def is_waiting(error: BaseException) -> bool:
    """Return whether the group could not start because too few workers are left."""
    return isinstance(error, ControllerError) and isinstance(error.controller_failure, NotEnoughWorkersError)


def is_exception(error: BaseException) -> bool:
    """Return whether a worker failed because its own code raised an exception, and not because another worker was lost."""
    failures = error.worker_failures.values() if isinstance(error, WorkerGroupError) else ()
    return any(kept_traceback(failure) is not None and not is_of_collective(failure) for failure in failures)


def lacks_cause(failures: Mapping[int, BaseException], world_size: int) -> bool:
    """Return whether all failures so far are broken collectives, so that the cause must be a rank that is not among them."""
    return 0 < len(failures) < world_size and all(is_of_collective(failure) for failure in failures.values())


def is_of_storage(error: BaseException) -> bool:
    """Return whether all failures are storage errors, apart from failures that follow from the loss of another rank."""
    failures = error.worker_failures.values() if isinstance(error, WorkerGroupError) else ()
    own = [failure for failure in failures if not is_of_collective(failure)]
    return bool(own) and all(isinstance(failure, StorageError) for failure in own)


def is_bug(error: BaseException) -> bool:
    """Return whether another attempt must not follow: a newer one exists, or it would fail in the same way.

    The latter is the case if a worker raised a UsageError, or one of BUGS while no worker died.
    """
    failures = list(error.worker_failures.values()) if isinstance(error, WorkerGroupError) else []
    if any(isinstance(failure, UsageError | SupersededError) for failure in failures):
        return True
    # If a worker died, the exceptions of the others may be consequences of its death.
    has_died = any(kept_traceback(failure) is None for failure in failures)
    return not has_died and any(
        (isinstance(failure, BUGS) and not isinstance(failure, StorageError)) or is_of_shards(failure)
        for failure in failures
    )


def summary(error: BaseException) -> str:
    """Return the workers' failures in one line, with rank, exception and line of code. Ranks that only noticed a lost rank come last."""
    if not isinstance(error, WorkerGroupError):
        return _one_line(error)
    failures = sorted(error.worker_failures.items())
    broken = [str(rank) for rank, failure in failures if is_of_collective(failure)]
    ranks: dict[str, list[str]] = {}
    for rank, failure in failures:
        if not is_of_collective(failure):
            ranks.setdefault(_one_line(failure), []).append(str(rank))
    if broken:
        ranks["a collective failed because another rank was lost"] = broken
    return "; ".join(f"rank{'s' * (len(own) > 1)} {', '.join(own)}: {text}" for text, own in ranks.items())


def whole_story(error: BaseException) -> str:
    """Return the full traceback of the first worker whose own code raised an exception, or Ray's description if there is none.

    If a newer attempt of the run exists, return the sentence that names it.
    """
    failures = error.worker_failures if isinstance(error, WorkerGroupError) else {}
    if newer := [failure for failure in failures.values() if isinstance(failure, SupersededError)]:
        return str(newer[0])
    for rank, failure in sorted(failures.items()):
        if text := kept_traceback(failure):
            return f"rank {rank}:\n{text}"
    return str(error)


def _one_line(failure: BaseException) -> str:
    text = kept_traceback(failure)
    if text is None:
        description = str(failure).strip()
        known = (loss for pattern, loss in LOSSES if re.search(pattern, description))
        return next(known, (description.splitlines() or [type(failure).__name__])[-1])
    message, place = (str(failure).strip().splitlines() or [""])[0], place_in_script(kept_traceback(failure) or "")
    at = f" at {place}" if place else ""
    kind = "out of memory: " if isinstance(failure, MemoryError | torch.OutOfMemoryError) else ""
    notes = "".join(f" ({note})" for note in getattr(failure, "__notes__", ()))  # for example the sample of a map
    return f"{kind}{type(failure).__name__}: {message}{at}{notes}"
