"""What the doctor makes of an examination's facts; a sound cluster has nothing to mend."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from undula.cluster.doctor import CHECKS, judge
from undula.cluster.examine import Budget, _within
from undula.cluster.facts import AllReduce, Clock, Facts, Gpu, Look, Node, NoticeSource, Room, Stored, Unreached
from undula.cluster.probe import Probe, _notice_source
from undula.errors import ClusterError

GIB = 2**30
HEAD = Node("a" * 56, "10.0.0.1", cpus=0, gpus=0, is_head=True)
SPOT = Node("b" * 56, "10.0.0.2", cpus=4, gpus=1, is_spot=True)
ON_DEMAND = Node("c" * 56, "10.0.0.3", cpus=4, gpus=1)
VERSIONS = {"Python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0+cu130", "undula": "0.1.0", "horovod": None}
LOOK = Look(
    VERSIONS,
    gpus_seen=1,
    cuda="13.0",
    rooms=(Room("/tmp/ray/session", 80 * GIB, 100 * GIB),),
    memory=Room("/dev/shm", 8 * GIB, 8 * GIB),
    notices=NoticeSource("AWS (http://169.254.169.254)"),
)
ON_HEAD = replace(LOOK, gpus_seen=0, cuda=None, versions={**VERSIONS, "torch": "2.13.0+cpu"})
STORED = Stored(16 * 2**20, write_s=0.16, read_s=0.08)
SOUND = Facts(
    "s3://bucket/runs",
    (HEAD, SPOT, ON_DEMAND),
    looks={HEAD.id: ON_HEAD, SPOT.id: LOOK, ON_DEMAND.id: LOOK},
    gpus={SPOT.id: (Gpu("GPU 0, L4"),), ON_DEMAND.id: (Gpu("GPU 0, L4"),)},
    clocks={node.id: Clock(0.01, 0.002) for node in (HEAD, SPOT, ON_DEMAND)},
    stored=dict.fromkeys((HEAD.id, SPOT.id, ON_DEMAND.id), STORED),
    all_reduce=AllReduce((SPOT.id, ON_DEMAND.id), "nccl", latency_s=0.0002, bytes_per_s=2 * GIB),
    dashboard_status=401,
)
NO_CLOUD = dict.fromkeys((HEAD.id, SPOT.id, ON_DEMAND.id), replace(LOOK, gpus_seen=0, notices=NoticeSource()))


def look_of(node: Node, **changes: Any) -> Facts:
    """The sound cluster with another look of one node."""
    return replace(SOUND, looks={**SOUND.looks, node.id: replace(SOUND.looks[node.id], **changes)})


def clock(offset_s: float, round_trip_s: float = 0.002) -> Facts:
    return replace(SOUND, clocks={**SOUND.clocks, SPOT.id: Clock(offset_s, round_trip_s)})


def stored(change: Stored, runs: str = "/home/ubuntu/runs") -> Facts:
    return replace(SOUND, runs=runs, stored={**SOUND.stored, SPOT.id: change})


def versions(node: Node, **changes: str | None) -> Facts:
    return look_of(node, versions={**SOUND.looks[node.id].versions, **changes})


TWO_HOROVODS = replace(
    SOUND,
    looks={
        **SOUND.looks,
        SPOT.id: replace(LOOK, versions={**VERSIONS, "horovod": "0.28.1"}),
        ON_DEMAND.id: replace(LOOK, versions={**VERSIONS, "horovod": "0.28.1+undula.99d800aa"}),
    },
)


def free(gib: float, of_gib: float = 100) -> Facts:
    return look_of(SPOT, rooms=(Room("/tmp/ray/session", int(gib * GIB), int(of_gib * GIB)),))


def memory(mib: int) -> Facts:
    return look_of(SPOT, memory=Room("/dev/shm", mib * 2**20, 2**40))


def gpu(problem: str, is_full: bool = False) -> Facts:
    return replace(SOUND, gpus={**SOUND.gpus, SPOT.id: (Gpu("GPU 0, L4", problem, is_full),)})


def test_a_sound_cluster_passes_every_check() -> None:
    results = judge(SOUND)
    assert [(each.check, each.verdict) for each in results] == [(name, "pass") for name in CHECKS]
    assert {each.check: each.message for each in results} == {
        "nodes": "3 nodes answer, and workers fit on 2",
        "token": "Ray turns away who has no token (status 401)",
        "versions": "Python 3.11.7, ray 2.60.0, torch 2.13.0+cu130, undula 0.1.0",
        "clocks": "within 11.0 ms of this machine's",
        "ports": "every node reaches every other, on a port that its system chose",
        "gpus": "2 GPUs multiply matrices rightly",
        "all-reduce": "2 nodes with nccl: 2.00 GiB/s, latency 0.20 ms; gradients of 100 M parameters take 0.19 s",
        "storage": "3 nodes share s3://bucket/runs; at once, the slowest writes 100 MiB/s and reads 200 MiB/s",
        "disk": "at least 80.0 GiB free for Ray's files",
        "memory": "at least 8.0 GiB of it is free: snapshots of 2.0 GiB a node fit",
        "notices": "3 nodes read AWS (http://169.254.169.254)",
    }


@pytest.mark.parametrize(
    ("facts", "check", "verdict", "words"),
    [
        (replace(SOUND, silent={SPOT.id: "no answer within 25 s"}), "nodes", "fail", ["10.0.0.2 (bbbbbbbb)", "no answer within 25 s"]),
        (replace(SOUND, nodes=(HEAD,), looks={HEAD.id: ON_HEAD}), "nodes", "warn", ["no node that trains", "min_workers"]),
        (replace(SOUND, dashboard_status=200), "token", "fail", ["RAY_AUTH_MODE=token"]),
        (replace(SOUND, dashboard_status=None), "token", "warn", ["--include-dashboard=false"]),
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
        (replace(SOUND, unreached=(Unreached(SPOT.id, HEAD.id, "timed out"),)), "ports", "fail",
         ["10.0.0.2 (bbbbbbbb) cannot reach the head 10.0.0.1 (aaaaaaaa) (timed out)", "security group"]),
        (look_of(SPOT, gpus_seen=0), "gpus", "fail", ["has GPU: 1 for Ray, and torch sees 0", "nvidia-smi"]),
        (look_of(SPOT, gpus_seen=0, cuda=None), "gpus", "fail", ["install a build of torch with CUDA"]),
        (look_of(SPOT, gpus_seen=2), "gpus", "warn", ["has GPU: 1 for Ray, and torch sees 2"]),
        (gpu("a product of two matrices comes out wrong"), "gpus", "fail", ["GPU 0, L4 of 10.0.0.2", "end the machine"]),
        (gpu("its memory is full", is_full=True), "gpus", "warn", ["was not tried"]),
        (replace(SOUND, all_reduce=AllReduce((SPOT.id, ON_DEMAND.id), "gloo", problems={SPOT.id: "RuntimeError: timed out"})),
         "all-reduce", "fail", ["2 nodes cannot reduce with gloo", "10.0.0.2", "security group", "GLOO_SOCKET_IFNAME"]),
        (stored(Stored(problem="cannot write /home/ubuntu/runs/x: Permission denied")), "storage", "fail",
         ["10.0.0.2", "Permission denied", "give in --runs a folder"]),
        (stored(Stored(problem="cannot write s3://bucket/runs/x: denied"), "s3://bucket/runs"), "storage", "fail", ["instance profile"]),
        (stored(replace(STORED, sees_ours=False)), "storage", "fail", ["is not seen on 10.0.0.2", "s3:// URL"]),
        (stored(replace(STORED, write_s=8.0)), "storage", "warn", ["writes 2 MiB/s", "notice"]),
        (free(8), "disk", "warn", ["8.0 GiB (8%) free at /tmp/ray/session"]),
        (free(0.5, of_gib=4), "disk", "fail", ["512 MiB (12%)"]),
        (free(40, of_gib=1000), "disk", "fail", ["40.0 GiB (4%)"]),
        (memory(1024), "memory", "warn", ["1.0 GiB of shared memory free at /dev/shm", "--shm-size"]),
        (memory(64), "memory", "fail", ["64 MiB"]),
        (look_of(SPOT, notices=NoticeSource("AWS", problem="no answer within 2 s")), "notices", "fail", ["cannot read AWS (no answer"]),
        (look_of(ON_DEMAND, notices=NoticeSource("AWS", problem="no answer within 2 s")), "notices", "warn", ["10.0.0.3"]),
        (look_of(SPOT, notices=NoticeSource("AWS", notice="AWS will terminate this instance")), "notices", "warn", ["about to go"]),
        (look_of(SPOT, notices=NoticeSource()), "notices", "warn", ["10.0.0.2 (bbbbbbbb) is labelled spot", "undula spot watch --source"]),
        (replace(SOUND, unmeasured=("storage",), stored={}), "storage", "warn", ["not measured", "no time was left"]),
        (replace(SOUND, unmeasured=("token",), dashboard_status=None), "token", "warn", ["not measured"]),
        (replace(SOUND, unmeasured=("all-reduce",), all_reduce=None), "all-reduce", "warn", ["not measured"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_mend(facts: Facts, check: str, verdict: str, words: list[str]) -> None:
    (found,) = [each for each in judge(facts) if each.check == check]
    assert found.verdict == verdict
    for word in words:
        assert word in found.message
    assert ": " in found.message, "what is wrong: how to mend it"
    assert {each.check for each in judge(facts) if each.verdict != "pass"} == {check}


@pytest.mark.parametrize(
    ("facts", "check", "message"),
    [
        (replace(SOUND, all_reduce=AllReduce((SPOT.id,), "nccl")), "all-reduce", "nothing to measure between"),
        (replace(SOUND, nodes=(replace(SPOT, gpus=0),), looks={SPOT.id: NO_CLOUD[SPOT.id]}), "ports", "one node"),
        (replace(SOUND, nodes=(HEAD, replace(SPOT, gpus=0), replace(ON_DEMAND, gpus=0)), looks=NO_CLOUD, gpus={}), "gpus",
         "no GPUs in the cluster"),
        (replace(SOUND, nodes=(HEAD, replace(SPOT, is_spot=False), ON_DEMAND), looks=NO_CLOUD), "notices",
         "not a cloud machine, nothing to read"),
        (look_of(SPOT, notices=NoticeSource(in_pod=True)), "notices", "1 pod learns of a notice by being ended"),
        (clock(0.6, round_trip_s=0.4), "clocks", "within 800.0 ms"),
    ],
)  # fmt: skip
def test_what_is_merely_absent_or_uncertain_passes(facts: Facts, check: str, message: str) -> None:
    (found,) = [each for each in judge(facts) if each.check == check]
    assert found.verdict == "pass"
    assert message in found.message


def test_no_mend_opens_the_metadata_to_containers() -> None:
    """With a higher hop limit every pod and container has the rights of its machine."""
    unread = look_of(SPOT, notices=NoticeSource("AWS", problem="no answer within 2 s"))
    assert not [each for each in judge(unread) if "HopLimit" in each.message]


def test_in_a_pod_no_metadata_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert _notice_source() == NoticeSource(in_pod=True)


def test_what_has_too_little_time_left_is_not_measured_and_what_is_cut_short_not_judged() -> None:
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
    assert budget.grant(None, 5) == 1, "what tidies up is asked in any case"
    assert budget.unmeasured == {"storage", "all-reduce", "clocks"}


def test_a_call_that_waits_without_end_is_left_behind() -> None:
    assert _within(10, lambda: 3, "late") == 3
    with pytest.raises(ClusterError, match="late"):
        _within(0.05, threading.Event().wait, "late")
    with pytest.raises(KeyError):
        _within(10, lambda: {}["a"], "late")


def test_of_a_cluster_that_says_nothing_nothing_is_said_to_be_well() -> None:
    facts = Facts("/runs", (SPOT,), silent={SPOT.id: "no answer within 25 s"}, dashboard_status=200)
    assert [(each.check, each.verdict) for each in judge(facts)] == [("nodes", "fail"), ("token", "fail")]


def test_many_problems_of_a_kind_are_told_in_few_lines() -> None:
    pairs = tuple(Unreached(SPOT.id, HEAD.id, "timed out") for _ in range(40))
    lines = [each.message for each in judge(replace(SOUND, unreached=pairs)) if each.check == "ports"]
    assert len(lines) == 4
    assert "and so for 36 more pairs" in lines[-1]


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        ("file:///cache/horovod-0.28.1-99d800aa-torch-2.13.0%2Bcpu-cp311-linux-x86_64/horovod-0.28.1.whl", "0.28.1+undula.99d800aa"),
        ("file:///wheels/horovod-0.28.1.whl", "0.28.1"),
        (None, "0.28.1"),
    ],
)  # fmt: skip
def test_a_build_of_horovod_is_told_from_others(
    origin: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "horovod-0.28.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    if origin:
        (about / "direct_url.json").write_text(json.dumps({"archive_info": {}, "url": origin}))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert Probe().look(str(tmp_path), str(tmp_path)).versions["horovod"] == told
