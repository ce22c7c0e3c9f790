"""Tests of the arithmetic of the memory of hosts."""

import gzip
import json
from dataclasses import replace
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undula.plan.gpus import GIB, GPUS, MACHINE_GIB
from undula.plan.host_memory import (
    HEAD_BYTES,
    LOADER_BYTES,
    NODE_BYTES,
    TASK_BYTES,
    WORKER_BYTES,
    DataCount,
    HostLoad,
    has_room_for_snapshots,
    parts_of_head,
    parts_of_host,
)

DATA = DataCount(window_bytes=1000, ahead_bytes=5000, read_tasks=2)
LOAD = HostLoad(state_bytes=GIB, batch_bytes=10, offloaded_bytes=0, data=DATA, virtual_workers=8)
SIZES = st.integers(0, 2**40)
LOADS = st.builds(
    HostLoad,
    state_bytes=SIZES,
    batch_bytes=SIZES,
    offloaded_bytes=SIZES,
    data=st.builds(DataCount, SIZES, SIZES, st.integers(0, 8), st.integers(0, 8), SIZES),
    virtual_workers=st.integers(8, 64),
    takes_snapshots=st.booleans(),
)


def test_a_worker_alone_holds_what_it_should() -> None:
    parts = parts_of_host(LOAD, 1, 1)
    assert parts.processes == NODE_BYTES + WORKER_BYTES + 2 * TASK_BYTES
    assert parts.snapshots == 2 * GIB
    assert parts.checkpoint == parts.replicas == GIB
    assert parts.data == (8 + 2) * 1000 + 5000 + 3 * 10
    assert parts.change == GIB, "the worker's own copy, beside the places of the checkpoint and the replica"
    assert parts.activations == 0


def test_loader_processes_have_micro_batches_and_copies_of_the_dataset() -> None:
    parts = parts_of_host(replace(LOAD, data=DataCount(loaders=3, dataset_bytes=777)), 2, 2)
    assert parts.data == 2 * ((3 + 2 * 3) * 10 + 777)
    assert parts.processes == NODE_BYTES + 2 * (WORKER_BYTES + 3 * LOADER_BYTES)


@given(LOADS, st.integers(1, 7))
def test_workers_of_a_host_share_its_snapshots_and_a_checkpoint(load: HostLoad, workers: int) -> None:
    few, more = parts_of_host(load, workers, 8), parts_of_host(load, workers + 1, 8)
    assert more.snapshots == few.snapshots == 2 * load.state_bytes * load.takes_snapshots
    assert more.checkpoint - few.checkpoint == pytest.approx(load.state_bytes / 8)
    assert more.data * workers == pytest.approx(few.data * (workers + 1))
    assert more.total > few.total


@given(LOADS, st.integers(1, 4))
def test_a_host_takes_no_more_if_others_have_workers_too(load: HostLoad, workers: int) -> None:
    alone, among = parts_of_host(load, workers, workers), parts_of_host(load, workers, 2 * workers)
    assert among.total <= alone.total * (1 + 1e-9)


@given(LOADS, st.integers(1, 8), st.integers(8, 16))
def test_there_is_room_for_the_state_of_each_worker_and_to_leave(load: HostLoad, workers: int, world_size: int) -> None:
    parts = parts_of_host(load, workers, world_size)
    copies = parts.checkpoint + parts.replicas + parts.change
    assert copies >= 3 * load.state_bytes * (1 - 1e-9), "all leave: in host memory, packed, and in the object store"
    assert parts.change >= workers * load.state_bytes, "a worker was lost"


@given(LOADS)
def test_the_head_keeps_a_replica_while_the_next_one_arrives(load: HostLoad) -> None:
    one_host, several = parts_of_head(load, True), parts_of_head(load, False)
    assert one_host.replicas == (3 if load.takes_snapshots else 2) * load.state_bytes
    assert several.replicas == 2 * load.state_bytes
    assert one_host.processes == HEAD_BYTES


def test_workers_of_a_sharded_model_have_snapshots_and_replicas_of_their_own_parts() -> None:
    load = replace(LOAD, split_bytes=GIB * 3 // 4)
    own = GIB / 4 + GIB * 3 / 4 / 8
    assert load.worker_bytes(8) == own
    parts = parts_of_host(load, 2, 8)
    assert parts.snapshots == 2 * 2 * own
    assert parts.replicas == 2 * own, "also if there are workers on other hosts"
    assert parts.checkpoint == GIB / 4
    assert parts_of_head(load, is_one_host=False).replicas == 3 * GIB
    more = replace(load, update_bytes=GIB // 4, sends_copies=False)
    assert parts_of_host(more, 2, 8).snapshots == parts.snapshots + 4 * GIB / 4 / 4
    assert parts_of_host(more, 2, 8).replicas == 0
    assert parts_of_head(more, is_one_host=False).replicas == 2 * GIB


def test_a_host_without_room_for_snapshots_trains_without_them() -> None:
    parts = parts_of_host(replace(LOAD, state_bytes=2 * GIB), 1, 1)
    assert has_room_for_snapshots(parts, 16 * GIB, 0.5), "/dev/shm has 8 GiB"
    assert not has_room_for_snapshots(parts, 15 * GIB, 0.5)


def test_machines_have_the_memory_that_aws_says() -> None:
    assert MACHINE_GIB.keys() == {machine for gpu in GPUS.values() for machine in gpu.machines}
    described = json.loads(gzip.decompress((files("moto.ec2") / "resources/instance_types.json.gz").read_bytes()))
    known = {machine: gib for machine, gib in MACHINE_GIB.items() if machine in described}
    assert len(known) >= 15
    assert known == {machine: described[machine]["MemoryInfo"]["SizeInMiB"] // 1024 for machine in known}
