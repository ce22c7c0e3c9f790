"""Tests of failures: which ones are retried, and how they are reported."""

import pickle
from typing import Any

import pytest
import torch
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.train import WorkerGroupError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.config import FailureConfig

from undula.elastic.ray.failures import (
    LONGEST_PAUSE_S,
    LOSSES_WITHOUT_NEWS,
    STORAGE_FAILURES,
    RetryUnlessBug,
    lacks_cause,
    summary,
    whole_story,
)
from undula.errors import ManifestError, StorageError, SupersededError, UsageError
from undula.train.shard_errors import MIXED
from undula.train.tracebacks import keep_traceback, kept_traceback

USERS_CODE = """
def train(batch):
    return batch["lable"]
"""


def raised(error: Exception) -> Exception:
    """Return an error as a worker raises it."""
    try:
        raise error
    except Exception as caught:
        keep_traceback(caught)
    copy: Exception = pickle.loads(pickle.dumps(error))
    return copy


def mistyped() -> Exception:
    scope: dict[str, Any] = {}
    exec(compile(USERS_CODE, "/tmp/jobs/col.py", "exec"), scope)
    try:
        scope["train"]({})
    except KeyError as error:
        keep_traceback(error)
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    raise AssertionError


def failed(*failures: Exception) -> WorkerGroupError:
    return WorkerGroupError("reported by Ray", dict(enumerate(failures)))


@pytest.mark.parametrize(
    ("error", "decision"),
    [
        (failed(raised(KeyError("lable"))), FailureDecision.RAISE),
        (failed(raised(FileNotFoundError("vocab.json"))), FailureDecision.RAISE),
        (failed(raised(ValueError("boom")), raised(RuntimeError("connection closed by peer"))), FailureDecision.RAISE),
        (failed(raised(ManifestError("part-0 is gone"))), FailureDecision.RAISE),
        (failed(raised(UsageError("step.batches() was called twice"))), FailureDecision.RAISE),
        (failed(raised(UsageError("x")), raised(RuntimeError("connection closed by peer"))), FailureDecision.RAISE),
        (failed(RayActorError(), raised(UsageError("x"))), FailureDecision.RAISE),
        (failed(RayActorError(), raised(SupersededError("attempt 2 was started"))), FailureDecision.RAISE),
        (failed(raised(StorageError("no space left"))), FailureDecision.RETRY),
        (failed(raised(RuntimeError("connection closed by peer"))), FailureDecision.RETRY),
        (failed(raised(RuntimeError("aten.add.Tensor got mixed torch.Tensor and DTensor"))), FailureDecision.RAISE),
        (failed(RayActorError()), FailureDecision.RETRY),
        (failed(RayActorError(), raised(ValueError("half a message"))), FailureDecision.RETRY),
    ],
)
def test_bugs_end_the_run_at_once_and_temporary_failures_are_retried(
    error: WorkerGroupError, decision: FailureDecision
) -> None:
    assert RetryUnlessBug(FailureConfig(max_failures=3)).make_decision(error) == decision


def test_torchs_error_about_a_shard_and_a_whole_tensor_has_the_fix() -> None:
    error = raised(RuntimeError("aten.mul.Tensor got mixed torch.Tensor and DTensor"))
    assert MIXED in str(kept_traceback(error))


def test_attempts_are_counted() -> None:
    policy = RetryUnlessBug(FailureConfig(max_failures=1))
    decisions = [policy.make_decision(failed(raised(RuntimeError("x")))) for _ in range(2)]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RAISE]


def test_an_exception_before_the_first_step_is_retried_once() -> None:
    policy, error = RetryUnlessBug(FailureConfig(max_failures=3)), failed(raised(RuntimeError("x")))
    assert not policy.waits_for_storage
    assert [policy.make_decision(error) for _ in range(2)] == [FailureDecision.RETRY, FailureDecision.RAISE]
    policy = RetryUnlessBug(FailureConfig(max_failures=3))
    policy.has_stepped = True
    decisions = [policy.make_decision(error) for _ in range(4)]
    assert decisions == [*[FailureDecision.RETRY] * 3, FailureDecision.RAISE]


def test_lost_workers_count_until_a_step_is_committed() -> None:
    policy = RetryUnlessBug(FailureConfig(max_failures=1))
    decisions = []
    for has_stepped in (True, True, False, False):
        policy.has_stepped = has_stepped
        decisions.append(policy.make_decision(failed(RayActorError())))
    assert decisions == [*[FailureDecision.RETRY] * 2, *[FailureDecision.RAISE] * 2]


def test_losses_at_the_same_step_again_and_again_end_the_run() -> None:
    """Each group commits the steps before it once more."""
    policy = RetryUnlessBug(FailureConfig(max_failures=3))
    decisions = []
    for furthest in (4, 7):
        for _ in range(LOSSES_WITHOUT_NEWS):
            for step in range(furthest - 3, furthest + 1):
                policy.observe(step)
            decisions.append(policy.make_decision(failed(RayActorError())))
    assert decisions == [FailureDecision.RETRY] * 2 * LOSSES_WITHOUT_NEWS
    policy.observe(7)
    assert policy.make_decision(failed(RayActorError())) == FailureDecision.RAISE


def test_a_storage_that_fails_between_steps_gets_time_to_recover() -> None:
    policy = RetryUnlessBug(FailureConfig(max_failures=1))
    outage = failed(raised(StorageError("no answer")), raised(RuntimeError("gloo: connection closed by peer")))
    policy.has_stepped = True
    pauses = []
    for _ in range(STORAGE_FAILURES):
        assert policy.make_decision(outage) == FailureDecision.RETRY
        pauses.append(policy.take_pause_s())
        assert policy.take_pause_s() == 0
    assert policy.waits_for_storage
    assert pauses[:3] == [2, 4, 8]
    assert max(pauses) == LONGEST_PAUSE_S
    assert policy.make_decision(outage) == FailureDecision.RAISE

    policy.has_stepped = True  # the storage has recovered in between
    assert policy.make_decision(outage) == FailureDecision.RETRY
    assert (
        policy.make_decision(failed(raised(RuntimeError("x")))) == FailureDecision.RETRY
    )  # the first frame in the script


def test_a_run_without_a_step_does_not_wait_for_the_storage() -> None:
    policy = RetryUnlessBug(FailureConfig(max_failures=1))
    decisions = [policy.make_decision(failed(raised(StorageError("no such bucket")))) for _ in range(2)]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RAISE]


def test_a_failure_is_reported_with_its_exception_and_the_users_line() -> None:
    assert summary(failed(mistyped())) == "rank 0: KeyError: 'lable' at col.py:3"
    noted = mistyped()
    noted.add_note("raised by the map for sample 21 of s3://bucket/data")
    assert summary(failed(noted)) == (
        "rank 0: KeyError: 'lable' at col.py:3 (raised by the map for sample 21 of s3://bucket/data)"
    )
    assert summary(failed(RayActorError())).startswith("rank 0: ")
    broken = raised(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert summary(failed(broken)) == "rank 0: a collective failed because another rank was lost"
    assert summary(failed(broken, mistyped(), broken)) == (
        "rank 1: KeyError: 'lable' at col.py:3; ranks 0, 2: a collective failed because another rank was lost"
    )
    assert summary(failed(mistyped(), mistyped())) == "ranks 0, 1: KeyError: 'lable' at col.py:3"
    story = whole_story(failed(RayActorError(), mistyped()))
    assert story.startswith("rank 1:\nTraceback (most recent call last)")
    assert story.endswith("KeyError: 'lable'\n")
    assert whole_story(RuntimeError("no workers")) == "no workers"
    assert whole_story(failed(broken, raised(SupersededError("attempt 2 was started")))) == "attempt 2 was started"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")), "out of memory: OutOfMemoryError: CUDA"),
        (raised(MemoryError("Unable to allocate 2 GiB")), "out of memory: MemoryError: Unable to allocate 2 GiB"),
        (RayError("Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: Task was killed"), "out of memory: Ray ended the"),
        (OutOfMemoryError("Task was killed due to the node running low on memory."), "out of memory: Ray ended the process"),
        (RayError("The actor died because its node has died. Node Id: 12"), "its node was lost"),
        (RayError("The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"), "its process crashed"),
    ],
)  # fmt: skip
def test_the_reason_why_a_worker_was_lost_is_named(error: Exception, words: str) -> None:
    assert summary(failed(error)).startswith(f"rank 0: {words}")


def test_broken_collectives_lack_their_cause_until_another_rank_fails() -> None:
    broken = raised(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert not lacks_cause({}, 2)
    assert lacks_cause({0: broken}, 2)
    assert not lacks_cause({0: broken, 1: raised(OSError("a fault of the user's code"))}, 2)
    assert not lacks_cause({0: broken, 1: broken}, 2)
    assert not lacks_cause({1: raised(OSError("a fault of the user's code"))}, 2)
