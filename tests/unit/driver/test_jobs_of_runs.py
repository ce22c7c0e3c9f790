"""Tests of the search for the jobs of a run on a cluster that others use too, and of a submission whose answer is lost."""

import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
from ray.job_submission import JobDetails, JobStatus, JobType

from undula.driver import submit
from undula.errors import ClusterError, ConnectionLostError, RunError, SpecError

MINE, OTHERS = "/home/me/undula/runs", "s3://team/runs"


def job(name: str, run: str, status: JobStatus = JobStatus.RUNNING, start_time: int = 0) -> JobDetails:
    return JobDetails(
        type=JobType.SUBMISSION,
        submission_id=name,
        status=status,
        entrypoint="python",
        metadata={submit.RUN: run},
        start_time=start_time,
    )


@dataclass
class Api:
    """Stand-in for the job API. Each submission takes the next answer, which is raised if it is an exception."""

    jobs: list[JobDetails]
    answers: Iterator[Exception | None] = field(default_factory=lambda: iter(()))
    posted: list[str] = field(default_factory=list)
    is_silent: bool = False

    def get_address(self) -> str:
        return "http://head:8265"

    def list_jobs(self) -> list[JobDetails]:
        return self.jobs

    def get_job_info(self, job: str) -> JobDetails:
        if self.is_silent:
            raise requests.exceptions.ReadTimeout("Read timed out.")
        if known := [own for own in self.jobs if own.submission_id == job]:
            return known[0]
        raise RuntimeError(f"Request failed with status code 404: Job {job} does not exist.")

    def submit_job(self, submission_id: str, metadata: dict[str, str], **_: Any) -> str:
        self.posted.append(submission_id)
        answer = next(self.answers)
        if not isinstance(answer, RuntimeError):
            self.jobs.append(job(submission_id, metadata[submit.RUN]))
        if answer is not None:
            raise answer
        return submission_id


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNDULA_RUNS", MINE)
    monkeypatch.chdir(tmp_path)


def ids(api: Api, run: str, runs: str | None = None) -> list[str | None]:
    return [job.submission_id for job in submit.jobs_of(api, run, runs)]  # type: ignore[arg-type]


def test_a_name_means_only_the_run_of_the_folder() -> None:
    api = Api([job("mine", f"{MINE}/first"), job("theirs", f"{OTHERS}/first")])
    assert ids(api, "first") == ["mine"]
    assert ids(api, "first", OTHERS) == ids(api, f"{OTHERS}/first/") == ["theirs"]
    assert ids(api, f"{MINE}/first") == ["mine"]


def test_a_name_that_only_other_folders_have_is_refused_with_the_candidates() -> None:
    api = Api([job("theirs", f"{OTHERS}/first"), job("hers", "/home/her/runs/first")])
    sentence = (
        f"has no job of first in {MINE}, but of /home/her/runs/first and {OTHERS}/first; give the directory of the run"
    )
    with pytest.raises(RunError, match=sentence):
        ids(api, "first")
    with pytest.raises(
        RunError, match="has no job of second; give the name of a run or study that was submitted to it"
    ):
        ids(api, "second")


def test_a_name_with_two_meanings_is_refused(tmp_path: Path) -> None:
    api = Api([job("mine", f"{MINE}/first"), job("here", f"{tmp_path}/first")])
    with pytest.raises(RunError, match=f"has jobs of .*{tmp_path}/first.*; give one of these directories"):
        ids(api, "first")
    assert ids(api, "first", MINE) == ["mine"]
    assert ids(Api(api.jobs[1:]), "first") == ["here"]


def test_a_refused_second_submission_does_not_hide_the_running_job() -> None:
    running, refused = job("running", f"{MINE}/a", start_time=1), job("refused", f"{MINE}/a", JobStatus.FAILED, 2)
    ended = job("ended", f"{MINE}/a", JobStatus.SUCCEEDED)
    jobs = submit.jobs_of(Api([ended, running, refused]), "a")  # type: ignore[arg-type]
    assert submit.current(jobs) is running
    assert submit.current(submit.jobs_of(Api([ended, refused]), "a")) is refused  # type: ignore[arg-type]


def started(api: Api, name: str = "raysubmit_1") -> None:
    submit.start(api, name, f"{MINE}/a", Path("/jobs/a.py"), (), {})  # type: ignore[arg-type]


def test_a_job_whose_acceptance_was_not_heard_is_started_once() -> None:
    api = Api([], iter([requests.exceptions.ReadTimeout("Read timed out.")]))
    started(api)
    assert api.posted == ["raysubmit_1"]
    started(api)  # as `--keep-alive` does after a lost answer
    assert api.posted == ["raysubmit_1"]


def test_a_cluster_that_does_not_answer_a_submission_may_train_the_job() -> None:
    with pytest.raises(ConnectionLostError, match="has not answered the submission of the job raysubmit_1, which may"):
        started(Api([], is_silent=True))


def test_a_refused_job_is_an_error() -> None:
    with pytest.raises(ClusterError, match="does not accept the job: no room"):
        started(Api([], iter([RuntimeError("no room")])))


def test_a_job_is_submitted_again_while_the_head_is_not_ready() -> None:
    error = "Request failed with status code 500: No available agent to submit job, please try again later.."
    api = Api([], iter([RuntimeError(error), RuntimeError(error), None]))
    started(api)
    assert [job.submission_id for job in api.jobs] == ["raysubmit_1"]
    assert len(api.posted) == 3


def test_a_folder_that_no_cluster_accepts_is_refused_with_its_largest_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as package:
        package.writestr("weights/a.bin", bytes(2**20))
        package.writestr("weights/b.bin", bytes(2**20))
        package.writestr("notes.txt", "small")
    monkeypatch.setattr(submit, "MOST_PACKAGE_BYTES", 2**20)
    api = submit.JobApi.__new__(submit.JobApi)
    with pytest.raises(
        SpecError,
        match=r"a folder that the job needs has 2 MiB when it is packed, and a cluster accepts 1 MiB; .* weights \(2 MiB\), notes.txt",
    ):
        api._do_request("PUT", "/api/packages/gcs/a.zip", data=content.getvalue())
