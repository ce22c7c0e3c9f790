"""Tests of following a job to its end, with interruptions of the connection."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
from ray.job_submission import JobStatus

from undula.driver import follow
from undula.errors import ConnectionLostError


@dataclass
class Api:
    """Stand-in for the job API. Each request takes the next answer, which is raised if it is an exception."""

    answers: Iterator[JobStatus | Exception]
    lines: list[str] = field(default_factory=list)
    error_type: str | None = None

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        for line in self.lines:
            yield f"{line}\n"
        self.lines.append(f"line {len(self.lines)}")

    def get_job_info(self, job_id: str) -> Any:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return type("Details", (), {"status": answer, "error_type": self.error_type})


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "RECONNECT_S", 0.0)


def test_a_lost_connection_is_restored_and_no_line_is_shown_twice() -> None:
    lost = requests.exceptions.ConnectionError("Remote end closed connection")
    api, shown = Api(iter([lost, JobStatus.RUNNING, lost, JobStatus.SUCCEEDED]), ["line 0"]), []
    details = follow.follow_to_the_end(api, "job", shown.append)  # type: ignore[arg-type]
    assert details
    assert details.status == JobStatus.SUCCEEDED
    assert [line for line in shown if line.startswith("line")] == [f"line {number}" for number in range(4)]
    assert "lost the connection to the job, which continues; reconnecting: Remote end closed connection" in shown


def test_a_lost_job_api_ends_following_with_one_sentence() -> None:
    api = Api(iter([requests.exceptions.ConnectionError("refused")] * 99))
    with pytest.raises(
        ConnectionLostError, match="lost the connection to the job raysubmit_1, which may still be running: refused"
    ):
        follow.follow_to_the_end(api, "raysubmit_1", lambda line: None)  # type: ignore[arg-type]


def test_a_job_that_a_new_head_does_not_know_is_lost() -> None:
    unknown = RuntimeError("Request failed with status code 404: Job job does not exist.")
    refused = requests.exceptions.ConnectionError("refused")
    api = Api(iter([refused] * 40 + [unknown, unknown]))
    assert follow.follow_to_the_end(api, "job", lambda line: None, forever=True) is None  # type: ignore[arg-type]


def test_a_job_whose_process_on_the_head_died_is_lost() -> None:
    api = Api(iter([JobStatus.FAILED]), error_type="JOB_SUPERVISOR_ACTOR_DIED")
    assert follow.follow_to_the_end(api, "job", lambda line: None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "code", "expected"), [("STOPPED", None, 130), ("FAILED", None, 1), ("FAILED", -9, 137)]
)
def test_a_follower_ends_with_the_status_of_its_job(status: str, code: int | None, expected: int) -> None:
    details = type("Details", (), {"status": JobStatus(status), "driver_exit_code": code, "message": "ended"})
    assert follow.exit_status(details, lambda line: None) == expected  # type: ignore[arg-type]
