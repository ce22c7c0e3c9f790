"""Tests that no collective times out before a hung rank is found: the controller watches the ranks, and a healthy one may take long."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig
from torch._C._distributed_c10d import TCPStore

from undula.elastic.pure.fleet import Work
from undula.elastic.pure.policy import collective_limit_s, hang_limit_s, patience_s
from undula.elastic.pure.spec import HorovodSpec, WorkersSpec
from undula.elastic.ray import backend
from undula.elastic.ray.backend import InProcessGroup, Rendezvous
from undula.elastic.ray.environment import variables_of_worker
from undula.elastic.ray.trainer import elastic_trainer, ray_trainer
from undula.parallel import layout
from undula.parallel.layout import join_layout, timeout_of
from undula.recovery.progress import (
    BETWEEN_STEPS,
    COMPILE_S,
    COMPILING,
    LONGEST_PHASE_S,
    UPDATE,
    VALIDATE,
    Phase,
    ProgressView,
)
from undula.storage import Store
from undula.train.single_process import local_world

CPU = torch.device("cpu")


def longest_phase_s(override_s: float | None) -> float:
    """Return the longest time without progress that a rank may take."""

    def patience(phase: Phase, allowed_s: float = 0.0) -> float:
        view = ProgressView(3, phase, 0.0, 1.0, allowed_s=allowed_s)
        return patience_s(view, hang_limit_s(1.0, override_s))

    return max(patience(COMPILING, COMPILE_S), *(patience(phase) for phase in (BETWEEN_STEPS, VALIDATE, UPDATE)))


def torch_config(horovod: HorovodSpec | None, hang_limit: float | None, folder: Path) -> TorchConfig:
    """Return the configuration of torch's process group in a job."""
    workers = WorkersSpec(hang_limit_s=hang_limit, gpus=0)
    more: dict[str, Any] = {"on_event": print, "prepare": print, "prepare_s": 0.0}
    trainer = elastic_trainer(
        print, "horovod" if horovod else "torch", horovod, workers, Work(1, 0.0), Store(str(folder)), **more
    )
    config: Any = trainer.backend_config
    return config if horovod is None else config.torch_config  # type: ignore[no-any-return]


@pytest.mark.parametrize("hang_limit", [None, 2.0, 10_000.0, 1e6])
def test_the_process_groups_of_a_job_wait_longer_than_any_rank_may_take(
    tmp_path: Path, hang_limit: float | None
) -> None:
    config = torch_config(None, hang_limit, tmp_path)
    assert config.timeout_s == collective_limit_s(hang_limit)
    # A validation of the script's own may consist of many parts, after each of which it calls run.alive().
    assert config.timeout_s >= 50 * longest_phase_s(hang_limit)


def test_the_process_group_beside_horovod_has_the_same_limit(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed: make horovod")
    config = torch_config(HorovodSpec(), 10_000.0, tmp_path)
    assert (config.backend, config.timeout_s) == ("gloo", collective_limit_s(10_000.0))


def test_the_groups_of_a_layout_have_the_limit_of_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_world(CPU):
        assert timeout_of(join_layout(0, 1, CPU).control) == timedelta(seconds=LONGEST_PHASE_S)
        # Ranks with GPUs have a group over gloo beside that of NCCL.
        monkeypatch.setattr(layout.dist, "get_backend", lambda group: "another")
        control = join_layout(0, 1, CPU).control
        assert control is not dist.group.WORLD
        assert timeout_of(control) == timedelta(seconds=LONGEST_PHASE_S)


def test_ranks_may_come_far_apart_to_their_first_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL exchanges its ids through the store when a group has its first collective."""
    stores: list[TCPStore] = []
    context = type("Context", (), {"get_world_rank": lambda self: 0, "get_world_size": lambda self: 2})()
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: CPU)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, store, **more: stores.append(store))
    monkeypatch.setattr(
        Rendezvous, "store", lambda *_: TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=10))
    )
    monkeypatch.setattr(backend, "_rendezvous", Rendezvous("127.0.0.1", 0, "gloo", 4e5))
    monkeypatch.setattr(backend, "check_connection", lambda *_: None)  # the other rank does not exist
    monkeypatch.setattr(backend, "name_of_node", lambda: "")
    InProcessGroup().__enter__()
    assert stores[0].timeout == timedelta(seconds=4e5)


def test_without_a_watching_controller_a_hang_ends_with_the_longest_phase(tmp_path: Path) -> None:
    config: Any = ray_trainer(print, WorkersSpec(gpus=0), Store(str(tmp_path)), print).backend_config
    assert config.timeout_s == longest_phase_s(None) == LONGEST_PHASE_S
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in variables_of_worker({"GPU": 1.0}, is_watched=False)
    assert variables_of_worker({"GPU": 1.0})["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
