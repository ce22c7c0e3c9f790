"""Tests that a job whose workers can never fit on a node is refused with the name of the missing resource."""

import sys
from pathlib import Path
from typing import Any

import pytest

from undula.cluster import local, room
from undula.cluster.room import refuse_what_never_fits
from undula.driver import submission
from undula.driver.submission import Submission, run_submission
from undula.elastic.pure.nodes import Shortage, shortage
from undula.elastic.pure.spec import WorkersSpec
from undula.elastic.ray.machine import machine_resources
from undula.errors import SpecError
from undula.telemetry.live import LiveScreen

MACHINE = {"CPU": 4.0, "GPU": 1.0, "memory": 1e9}


@pytest.mark.parametrize(
    ("per_worker", "num_workers", "missing"),
    [
        ({"CPU": 1.0}, 4, None),
        ({"CPU": 1.0, "GPU": 0.0}, 4, None),
        ({"CPU": 1.0, "GPU": 1.0}, 1, None),
        ({"GPU": 0.3}, 3, None),
        ({}, 3, None),
        ({"CPU": 1.0}, 5, Shortage("CPU", 1.0, 4.0, num_fitting=4)),
        ({"CPU": 1.0, "GPU": 1.0}, 2, Shortage("GPU", 1.0, 1.0, num_fitting=1)),
        ({"CPU": 8.0, "GPU": 4.0}, 1, Shortage("GPU", 4.0, 1.0, num_fitting=0)),
        ({"CPU": 1.0, "disk": 2.0}, 1, Shortage("disk", 2.0, 0.0, num_fitting=0)),
    ],
)
def test_the_scarcest_resource_is_named(
    per_worker: dict[str, float], num_workers: int, missing: Shortage | None
) -> None:
    assert shortage(MACHINE, per_worker, num_workers) == missing


@pytest.mark.parametrize(
    ("workers", "share", "what", "fix"),
    [
        (WorkersSpec(gpus=2), 1, "job.yaml:7: workers.gpus is 2, but this machine has 1 GPU", "workers.gpus=1"),
        (WorkersSpec(min=2, max=2), 1, "command line: workers.min is 2 and workers.gpus is 1, but this machine has 1 GPU",
         "workers.min=1"),
        (WorkersSpec(cpus=8), 1, "default: workers.cpus is 8, but this machine has 4 CPUs", "workers.cpus=4"),
        (WorkersSpec(resources={"disk": 1}), 1, "default: workers.resources.disk is 1, but this machine has no disk",
         "workers.resources.disk=0"),
        (WorkersSpec(min=2, max=2, gpus=1), 1, "command line: workers.min is 2 and workers.gpus is 1, but this machine has 1 GPU",
         "workers.min=1"),
        (WorkersSpec(gpus=8), 4, "job.yaml:7: workers.gpus is 8, shared by 4 packed trainings, but this machine has 1 GPU",
         "workers.gpus=4"),
    ],
)  # fmt: skip
def test_the_refusal_has_the_place_the_amounts_and_the_fix(
    monkeypatch: pytest.MonkeyPatch, workers: WorkersSpec, share: int, what: str, fix: str
) -> None:
    monkeypatch.setattr(room, "machine_resources", lambda num_cpus: {**MACHINE, "CPU": num_cpus})
    origins = {"workers.gpus": "job.yaml:7", "workers.min": "command line"}
    with pytest.raises(SpecError) as refused:
        refuse_what_never_fits(workers, origins, 4, workers.min, "this machine", ", or ask elsewhere", share)
    message = str(refused.value)
    assert message.startswith(f"{what}, ")
    assert message.endswith(f"; set {fix}, or ask elsewhere")


def test_a_job_that_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "machine_resources", lambda num_cpus: {**MACHINE, "CPU": num_cpus})
    refuse_what_never_fits(WorkersSpec(max=4, gpus=1), {}, 4, num_workers=1, node="it", fix="")
    refuse_what_never_fits(WorkersSpec(max=4), {}, 4, num_workers=1, node="it", fix="")
    refuse_what_never_fits(WorkersSpec(gpus=4), {}, 4, num_workers=1, node="it", fix="", share=4)


def test_several_workers_fit_on_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "machine_resources", lambda num_cpus: {"CPU": num_cpus})
    refuse_what_never_fits(WorkersSpec(min=4, max=4), {}, 4, num_workers=4, node="it", fix="")


def test_the_resources_of_a_local_node_are_those_that_ray_detects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 3, "disk": 2}')
    offered = machine_resources(5)
    assert (offered["CPU"], offered["GPU"], offered["disk"]) == (5, 3, 2)
    assert offered["node:__internal_head__"] == 1


def job(workers: WorkersSpec) -> Submission:
    return Submission(Path("job.py"), (), workers, {"workers.gpus": "job.yaml:7"}, "run", "/runs/job")


def test_a_job_that_never_fits_is_refused_before_a_local_cluster_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a cluster was started")

    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 0}')  # as on a machine without a GPU
    monkeypatch.setattr(local, "DEFAULT_DASHBOARD", "http://127.0.0.1:1")
    monkeypatch.setattr(submission, "run_on_own_cluster", started)
    with pytest.raises(
        SpecError, match=r"job\.yaml:7: workers\.gpus is 1, but this machine has no GPU, .* set workers\.gpus=0, or"
    ):
        run_submission(job(WorkersSpec(gpus=1)), None, LiveScreen(sys.stdout), "follow")


def test_a_job_for_another_cluster_is_not_refused_for_the_resources_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submitted: list[str] = []

    ended = type("Details", (), {"status": "SUCCEEDED"})
    monkeypatch.setattr("undula.driver.submit.connect", submitted.append)
    monkeypatch.setattr("undula.driver.submit.start", lambda *_: "job")
    monkeypatch.setattr("undula.driver.follow.follow_to_the_end", lambda *_, **__: ended)
    assert run_submission(job(WorkersSpec(gpus=1)), "http://head:8265", LiveScreen(sys.stdout), "follow") == 0
    assert submitted == ["http://head:8265"]
