"""Tests of the doctor's judgement of facts: a healthy cluster passes every check, and each problem comes with its fix."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from undula.cluster.doctor import CHECKS, judge
from undula.cluster.examine import Budget, _within
from undula.cluster.facts import (
    AllReduce,
    Clock,
    Facts,
    FailedConnection,
    FileSystem,
    Gpu,
    NodeFacts,
    NodeReport,
    NoticeSource,
    Stored,
)
from undula.cluster.probe import Probe, _notice_source
from undula.errors import ClusterError

GIB = 2**30
HEAD = NodeFacts("a" * 56, "10.0.0.1", cpus=0, gpus=0, is_head=True)
SPOT = NodeFacts("b" * 56, "10.0.0.2", cpus=4, gpus=1, is_spot=True)
ON_DEMAND = NodeFacts("c" * 56, "10.0.0.3", cpus=4, gpus=1)
VERSIONS = {"Python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0+cu130", "undula": "0.1.0", "horovod": None}
REPORT = NodeReport(
    VERSIONS,
    gpus_seen=1,
    cuda="13.0",
    disks=(FileSystem("/tmp/ray/session", 80 * GIB, 100 * GIB),),
    memory=FileSystem("/dev/shm", 8 * GIB, 8 * GIB),
    notices=NoticeSource("AWS (http://169.254.169.254)"),
)
ON_HEAD = replace(REPORT, gpus_seen=0, cuda=None, versions={**VERSIONS, "torch": "2.13.0+cpu"})
STORED = Stored(16 * 2**20, write_s=0.16, read_s=0.08)
HEALTHY = Facts(
    "s3://bucket/runs",
    (HEAD, SPOT, ON_DEMAND),
    reports={HEAD.id: ON_HEAD, SPOT.id: REPORT, ON_DEMAND.id: REPORT},
    gpus={SPOT.id: (Gpu("GPU 0, L4"),), ON_DEMAND.id: (Gpu("GPU 0, L4"),)},
    clocks={node.id: Clock(0.01, 0.002) for node in (HEAD, SPOT, ON_DEMAND)},
    stored=dict.fromkeys((HEAD.id, SPOT.id, ON_DEMAND.id), STORED),
    all_reduce=AllReduce((SPOT.id, ON_DEMAND.id), "nccl", latency_s=0.0002, bytes_per_s=2 * GIB),
    dashboard_status=401,
)
NO_CLOUD = dict.fromkeys((HEAD.id, SPOT.id, ON_DEMAND.id), replace(REPORT, gpus_seen=0, notices=NoticeSource()))


def report_of(node: NodeFacts, **changes: Any) -> Facts:
    """Return the facts of a healthy cluster with another report of one node."""
    return replace(HEALTHY, reports={**HEALTHY.reports, node.id: replace(HEALTHY.reports[node.id], **changes)})


def clock(offset_s: float, round_trip_s: float = 0.002) -> Facts:
    return replace(HEALTHY, clocks={**HEALTHY.clocks, SPOT.id: Clock(offset_s, round_trip_s)})


def stored(change: Stored, runs: str = "/home/ubuntu/runs") -> Facts:
    return replace(HEALTHY, runs=runs, stored={**HEALTHY.stored, SPOT.id: change})


def versions(node: NodeFacts, **changes: str | None) -> Facts:
    return report_of(node, versions={**HEALTHY.reports[node.id].versions, **changes})


TWO_HOROVODS = replace(
    HEALTHY,
    reports={
        **HEALTHY.reports,
        SPOT.id: replace(REPORT, versions={**VERSIONS, "horovod": "0.28.1"}),
        ON_DEMAND.id: replace(REPORT, versions={**VERSIONS, "horovod": "0.28.1+undula.99d800aa"}),
    },
)


def free(gib: float, of_gib: float = 100) -> Facts:
    return report_of(SPOT, disks=(FileSystem("/tmp/ray/session", int(gib * GIB), int(of_gib * GIB)),))


def memory(mib: int) -> Facts:
    return report_of(SPOT, memory=FileSystem("/dev/shm", mib * 2**20, 2**40))


def workers_on(node: NodeFacts, count: int, free_gpus: float) -> Facts:
    busy = replace(node, num_workers=count, free_gpus=free_gpus)
    return replace(HEALTHY, nodes=tuple(busy if other is node else other for other in HEALTHY.nodes))


def gpu(problem: str, is_full: bool = False) -> Facts:
    return replace(HEALTHY, gpus={**HEALTHY.gpus, SPOT.id: (Gpu("GPU 0, L4", problem, is_full),)})


def test_a_healthy_cluster_passes_every_check() -> None:
    results = judge(HEALTHY)
    assert [(result.check, result.verdict) for result in results] == [(name, "pass") for name in CHECKS]
    figures = {
        "nodes": ["3 nodes", "workers fit on 2"],
        "token": ["401"],
        "versions": ["Python 3.11.7", "ray 2.60.0", "torch 2.13.0+cu130", "undula 0.1.0"],
        "clocks": ["11.0 ms"],
        "ports": [],
        "gpus": ["2 GPUs"],
        "all-reduce": ["2 nodes", "nccl", "2.00 GiB/s", "0.20 ms", "0.19 s"],
        "storage": ["3 nodes", "s3://bucket/runs", "writes 100 MiB/s", "reads 200 MiB/s"],
        "disk": ["80.0 GiB"],
        "memory": ["8.0 GiB", "snapshots of 2.0 GiB"],
        "notices": ["3 nodes", "AWS (http://169.254.169.254)"],
    }
    for result in results:
        assert all(figure in result.message for figure in figures[result.check]), result


@pytest.mark.parametrize(
    ("facts", "check", "verdict", "parts"),
    [
        (replace(HEALTHY, unresponsive={SPOT.id: "no answer within 25 s"}), "nodes", "fail",
         ["10.0.0.2 (bbbbbbbb)", "no answer within 25 s"]),
        (replace(HEALTHY, nodes=(HEAD,), reports={HEAD.id: ON_HEAD}), "nodes", "warn", ["no worker node is up", "min_workers"]),
        (replace(HEALTHY, dashboard_status=200), "token", "fail", ["RAY_AUTH_MODE=token"]),
        (replace(HEALTHY, dashboard_status=None), "token", "warn", ["--include-dashboard=false"]),
        (versions(SPOT, ray="2.59.0"), "versions", "fail", ["2.59.0 on 10.0.0.2", "2.60.0 on the head 10.0.0.1"]),
        (versions(SPOT, torch="2.13.0+cu126"), "versions", "fail", ["torch is 2.13.0+c", "10.0.0.2", "10.0.0.3"]),
        (versions(HEAD, torch="2.12.0+cpu"), "versions", "fail", ["torch is 2.12.0+cpu on the head"]),
        (versions(SPOT, torch=None), "versions", "fail", ["none on 10.0.0.2"]),
        (versions(SPOT, undula=None), "versions", "warn", ["undula is not installed on 10.0.0.2", "spot watcher"]),
        (versions(SPOT, undula="0.0.9"), "versions", "fail", ["undula is 0.0.9 on 10.0.0.2"]),
        (TWO_HOROVODS, "versions", "fail", ["horovod is 0.28.1 on 10.0.0.2", "0.28.1+undula.99d800aa on 10.0.0.3"]),
        (versions(HEAD, horovod="0.28.1"), "versions", "warn", ["10.0.0.2", "10.0.0.3", "undula build-horovod"]),
        (clock(0.8), "clocks", "warn", ["10.0.0.2 (bbbbbbbb) is 0.8 s ahead", "chrony"]),
        (clock(-7.0), "clocks", "fail", ["is 7.0 s behind"]),
        (replace(HEALTHY, failed_connections=(FailedConnection(SPOT.id, HEAD.id, "timed out"),)), "ports", "fail",
         ["10.0.0.2 (bbbbbbbb) cannot reach the head 10.0.0.1 (aaaaaaaa) (timed out)", "security group"]),
        (report_of(SPOT, gpus_seen=0), "gpus", "fail", ["GPU: 1 for 10.0.0.2", "torch sees 0", "nvidia-smi"]),
        (report_of(SPOT, gpus_seen=0, cuda=None), "gpus", "fail", ["install a build of torch with CUDA"]),
        (report_of(SPOT, gpus_seen=2), "gpus", "warn", ["GPU: 1 for 10.0.0.2", "torch sees 2"]),
        (workers_on(SPOT, 2, free_gpus=1), "gpus", "warn",
         ["1 of 1 GPUs of 10.0.0.2 (bbbbbbbb) are idle, although 2 workers train there", "set workers.gpus to auto"]),
        (gpu("a matrix product has a wrong result"), "gpus", "fail", ["GPU 0, L4 of 10.0.0.2", "terminate the machine"]),
        (gpu("its memory is full", is_full=True), "gpus", "warn", ["was not tested"]),
        (replace(HEALTHY, all_reduce=AllReduce((SPOT.id, ON_DEMAND.id), "gloo", problems={SPOT.id: "RuntimeError: timed out"})),
         "all-reduce", "fail", ["2 nodes with gloo failed", "10.0.0.2", "security group", "--node-ip-address"]),
        (stored(Stored(problem="cannot write /home/ubuntu/runs/x: Permission denied")), "storage", "fail",
         ["10.0.0.2", "Permission denied", "set --runs to a folder"]),
        (stored(Stored(problem="cannot write s3://bucket/runs/x: denied"), "s3://bucket/runs"), "storage", "fail", ["instance profile"]),
        (stored(replace(STORED, sees_ours=False)), "storage", "fail", ["10.0.0.2 (bbbbbbbb): files", "s3:// URL"]),
        (stored(replace(STORED, write_s=8.0)), "storage", "warn", ["writes 2 MiB/s", "notice"]),
        (free(8), "disk", "warn", ["8.0 GiB (8%) free at /tmp/ray/session"]),
        (free(0.5, of_gib=4), "disk", "fail", ["512 MiB (12%)"]),
        (free(40, of_gib=1000), "disk", "fail", ["40.0 GiB (4%)"]),
        (memory(1024), "memory", "warn", ["1.0 GiB of shared memory free at /dev/shm", "--shm-size"]),
        (memory(64), "memory", "fail", ["64 MiB"]),
        (report_of(SPOT, notices=NoticeSource("AWS", problem="no answer within 2 s")), "notices", "fail", ["cannot read AWS (no answer"]),
        (report_of(ON_DEMAND, notices=NoticeSource("AWS", problem="no answer within 2 s")), "notices", "warn", ["10.0.0.3"]),
        (report_of(SPOT, notices=NoticeSource("AWS", notice="AWS will terminate this instance")), "notices", "warn",
         ["about to be preempted"]),
        (report_of(SPOT, notices=NoticeSource()), "notices", "warn",
         ["10.0.0.2 (bbbbbbbb) is labelled spot", "undula spot watch --source"]),
        (replace(HEALTHY, unmeasured=("storage",), stored={}), "storage", "warn", ["not measured", "no time was left"]),
        (replace(HEALTHY, unmeasured=("token",), dashboard_status=None), "token", "warn", ["not measured"]),
        (replace(HEALTHY, unmeasured=("all-reduce",), all_reduce=None), "all-reduce", "warn", ["not measured"]),
    ],
)  # fmt: skip
def test_each_problem_is_reported_by_one_check_with_its_fix(
    facts: Facts, check: str, verdict: str, parts: list[str]
) -> None:
    (reported,) = [result for result in judge(facts) if result.check == check]
    assert reported.verdict == verdict
    for part in parts:
        assert part in reported.message
    assert "; " in reported.message, "a message has a problem and a fix"
    assert {result.check for result in judge(facts) if result.verdict != "pass"} == {check}


@pytest.mark.parametrize(
    ("facts", "check", "message"),
    [
        (replace(HEALTHY, all_reduce=AllReduce((SPOT.id,), "nccl")), "all-reduce", "nothing was measured"),
        (replace(HEALTHY, nodes=(replace(SPOT, gpus=0),), reports={SPOT.id: NO_CLOUD[SPOT.id]}), "ports", "one node"),
        (replace(HEALTHY, nodes=(HEAD, replace(SPOT, gpus=0), replace(ON_DEMAND, gpus=0)), reports=NO_CLOUD, gpus={}), "gpus",
         "no GPUs"),
        (replace(HEALTHY, nodes=(HEAD, replace(SPOT, is_spot=False), ON_DEMAND), reports=NO_CLOUD), "notices", "no cloud machines"),
        (report_of(SPOT, notices=NoticeSource(in_pod=True)), "notices", "1 pod, where only a preStop hook"),
        (clock(0.6, round_trip_s=0.4), "clocks", "within 800.0 ms"),
    ],
)  # fmt: skip
def test_missing_hardware_and_uncertain_measurements_pass(facts: Facts, check: str, message: str) -> None:
    (reported,) = [result for result in judge(facts) if result.check == check]
    assert reported.verdict == "pass"
    assert message in reported.message


def test_no_fix_gives_containers_access_to_the_metadata() -> None:
    """With a higher hop limit, every pod and container would get the permissions of its machine."""
    unread = report_of(SPOT, notices=NoticeSource("AWS", problem="no answer within 2 s"))
    messages = [result.message for result in judge(unread)]
    assert any("no answer within 2 s" in message for message in messages)
    assert not any("HopLimit" in message for message in messages)


def test_a_pod_does_not_request_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert _notice_source() == NoticeSource(in_pod=True)


def test_checks_without_enough_time_are_unmeasured_and_not_failed() -> None:
    now = [0.0]
    budget = Budget(50, lambda: now[0])
    assert budget.grant("gpus", 15) == 15
    assert not budget.is_cut("gpus", 15, 15)
    now[0] = 40.0
    assert budget.grant("storage", 15) == 10
    assert budget.unmeasured == set()
    assert budget.is_cut("storage", 10, 15)
    now[0] = 49.0
    assert budget.grant("all-reduce", 20) is None
    assert budget.grant("clocks", 2) is None
    assert budget.grant(None, 5) == 1, "cleanup is always requested"
    assert budget.unmeasured == {"storage", "all-reduce", "clocks"}


def test_a_call_that_never_returns_is_abandoned() -> None:
    assert _within(10, lambda: 3, "late") == 3
    with pytest.raises(ClusterError, match="late"):
        _within(0.05, threading.Event().wait, "late")
    with pytest.raises(KeyError):
        _within(10, lambda: {}["a"], "late")


def test_nothing_passes_on_a_cluster_that_does_not_answer() -> None:
    facts = Facts("/runs", (SPOT,), unresponsive={SPOT.id: "no answer within 25 s"}, dashboard_status=200)
    assert [(result.check, result.verdict) for result in judge(facts)] == [("nodes", "fail"), ("token", "fail")]


def test_many_problems_of_a_kind_are_reported_in_few_lines() -> None:
    pairs = tuple(FailedConnection(SPOT.id, HEAD.id, "timed out") for _ in range(40))
    lines = [result.message for result in judge(replace(HEALTHY, failed_connections=pairs)) if result.check == "ports"]
    assert len(lines) == 4
    assert "36 more pairs" in lines[-1]


@pytest.mark.parametrize(
    ("origin", "version"),
    [
        ("file:///cache/horovod-0.28.1-99d800aa-torch-2.13.0%2Bcpu-cp311-linux-x86_64/horovod-0.28.1.whl", "0.28.1+undula.99d800aa"),
        ("file:///wheels/horovod-0.28.1.whl", "0.28.1"),
        (None, "0.28.1"),
    ],
)  # fmt: skip
def test_the_version_of_horovod_includes_our_build(
    origin: str | None, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "horovod-0.28.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    if origin:
        (about / "direct_url.json").write_text(json.dumps({"archive_info": {}, "url": origin}))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert Probe().report(str(tmp_path), str(tmp_path)).versions["horovod"] == version
