"""Tests of the memory of a cluster's GPUs, which nodes and node types tell."""

import stat
from pathlib import Path
from typing import Any

import pytest

from undula.elastic.ray import gpu_memory
from undula.elastic.ray.gpu_memory import NodeGpu, least_memory, smallest_gpu
from undula.plan.fleet import GPU_GIB, MACHINE
from undula.plan.gpus import GPUS, known_gpu

GIB = 2**30


def node(gpus: float, gib: str | None, kind: str = "L4", alive: bool = True) -> dict[str, Any]:
    labels = {} if gib is None else {GPU_GIB: gib}
    return {
        "NodeID": f"{gpus}{gib}",
        "Alive": alive,
        "Resources": {"GPU": gpus, f"accelerator_type:{kind}": 1.0},
        "Labels": labels,
    }


def test_the_smallest_gpu_of_the_nodes_that_are_up_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node(1, "22", "L4"), node(4, "14.7", "T4"), node(1, "8", alive=False), node(0, "4")]
    monkeypatch.setattr(gpu_memory.ray, "nodes", lambda: nodes)
    assert smallest_gpu({"GPU": 1.0}) == NodeGpu("T4", 14.7 * GIB)
    assert smallest_gpu({"GPU": 1.0, "accelerator_type:L4": 0.01}) == NodeGpu("L4", 22 * GIB), "where no worker fits"


def test_without_a_node_the_types_that_the_autoscaler_can_start_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    types = {
        "large": {"resources": {"GPU": 1, "accelerator_type:H100": 1}, "labels": {GPU_GIB: "79.2"}},
        "off": {"resources": {"GPU": 1}, "labels": {GPU_GIB: "8"}, "max_workers": 0},
        "silent": {"resources": {"GPU": 1}},
    }
    monkeypatch.setattr(gpu_memory.ray, "nodes", lambda: [node(0, None)])
    monkeypatch.setattr(gpu_memory, "config_of_cluster", lambda: {"available_node_types": types})
    assert smallest_gpu({"GPU": 1.0}) == NodeGpu("H100", 79.2 * GIB)
    types["machine"] = {"resources": {"GPU": 1}, "labels": {MACHINE: "g6.2xlarge"}}
    assert smallest_gpu({"GPU": 1.0}) == NodeGpu("L4", GPUS["L4"].memory_bytes)
    monkeypatch.setattr(gpu_memory, "config_of_cluster", lambda: None)
    assert smallest_gpu({"GPU": 1.0}) is None


@pytest.mark.parametrize(
    ("told", "count", "expected"),
    [
        ("echo '15360, 433'; echo '23034, 512'", 2, (15360 - 433) * 2**20),
        (
            "echo '15360, 433'; echo '23034, 512'",
            1,
            (23034 - 512) * 2**20,
        ),  # Ray has one of them, which may be the larger one
        ("echo '[N/A], [N/A]'", 1, None),
        ("echo; exit 9", 1, None),
        ("true", 1, None),
    ],
)
def test_nvidias_tool_tells_what_is_left_for_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, count: float, expected: float | None
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{told}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert least_memory(count) == expected


def test_without_nvidias_tool_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert least_memory(1) is None


@pytest.mark.parametrize(
    ("name", "gib", "key"),
    [("A100", 39.4, "A100-40"), ("A100-80G", 79.1, "A100-80"), ("T4", 14.6, "T4"), ("T4", 8, None), ("GPU", 22, None)],
)
def test_a_kind_is_known_by_its_name_and_its_memory(name: str, gib: float, key: str | None) -> None:
    assert known_gpu(name, gib * GIB) == (GPUS[key] if key else None)
