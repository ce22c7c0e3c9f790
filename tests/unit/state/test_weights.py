"""Tests of weights outside of a run: loaded into plain and sharded models, and exported as Hugging Face stores them."""

import ctypes
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numbers_job import cpu_run, network, numbers_job
from ranks import on_ranks
from safetensors import safe_open
from safetensors.torch import load, load_file, load_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from undula import load_weights
from undula.errors import CheckpointError, SpecError
from undula.report.text import number
from undula.state.commit import find_commits
from undula.state.events import ValidationEvent
from undula.state.export import INDEX, ONE_FILE, export_weights
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store
from undula.train.job import Job


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    x = x.float()[:, None] / 48
    return (model(x) - x.square()).square().mean()


def _train(rank: int, world_size: int, job: Job, is_sharded: bool) -> None:
    run = cpu_run(job, rank, world_size)
    model = run.model(network(is_sharded))
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))
    for step in run.steps(validate=lambda batch: loss_of(model, batch["x"])):
        for batch in step.batches():
            step.backward(loss_of(model, batch["x"]))
        step.update()


@pytest.fixture(params=[False, True], ids=["whole", "sharded"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    """Run of 4 steps on two ranks, with checkpoints of the steps 2 and 4."""
    job = numbers_job(tmp_path)
    on_ranks(2, _train, replace(job, data=replace(job.data, validation=job.data.train)), request.param)
    return Store(job.run_url)


def validation_loss(model: nn.Module) -> str:
    with torch.no_grad():
        return number(float(loss_of(model, torch.arange(48))))


def recorded_loss(run: Store) -> str:
    return number(events_of(read_ledger(run).events, ValidationEvent)[-1].loss)


def test_loaded_weights_have_the_validation_loss_of_the_run(run: Store) -> None:
    model = network()
    assert validation_loss(model) != recorded_loss(run)
    assert load_weights(model, run.url) == 4
    assert validation_loss(model) == recorded_loss(run)
    former = network()
    assert load_weights(former, run.url, 2) == 2
    assert validation_loss(former) != recorded_loss(run)


@pytest.mark.parametrize("file_bytes", [10**9, 40])
def test_exported_weights_in_the_plain_model_have_the_validation_loss_of_the_run(
    run: Store, tmp_path: Path, file_bytes: int
) -> None:
    out = tmp_path / "out"
    exported = export_weights(run, Store(str(out)), file_bytes=file_bytes)
    assert (exported.step, exported.tensors, exported.bytes) == (4, 4, 22 * 4)
    assert {path.name for path in out.iterdir()} - {INDEX} == {*exported.files}
    weights: dict[str, Tensor] = {}
    for name in exported.files:
        part = load_file(out / name)
        assert sum(each.nbytes for each in part.values()) <= file_bytes
        weights |= part
        with safe_open(out / name, "pt") as file:
            assert file.metadata()["format"] == "pt"
    if file_bytes == 40:
        index = json.loads((out / INDEX).read_text())
        assert index["metadata"] == {"total_size": exported.bytes}
        assert index["weight_map"].keys() == weights.keys()
        assert all(key in load_file(out / name) for key, name in index["weight_map"].items())
    else:
        assert exported.files == (ONE_FILE,)
    model = network()
    model.load_state_dict(weights)
    assert validation_loss(model) == recorded_loss(run)


def _loaded(rank: int, world_size: int, url: str) -> list[Any]:
    model = network(is_sharded=True)
    load_weights(model, url)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    return [each.full_tensor().tolist() for each in model.parameters()]  # type: ignore[attr-defined]


def test_weights_are_loaded_into_a_sharded_model(run: Store) -> None:
    whole = network()
    load_weights(whole, run.url)
    for found in on_ranks(2, _loaded, run.url):
        assert found == [each.tolist() for each in whole.parameters()]


@pytest.fixture
def finished(tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.chdir(tmp_path)
    job = numbers_job(tmp_path)
    _train(0, 1, job, False)
    return Store(job.run_url)


def test_a_model_on_the_meta_device_is_refused(finished: Store) -> None:
    with torch.device("meta"):
        model = network()
    with pytest.raises(SpecError, match=r"0\.weight of the model is on the meta device.*; call model\.to_empty\("):
        load_weights(model, finished.url)


def test_what_does_not_fit_is_refused_and_named(finished: Store, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has checkpoints of the steps 2, 4, and none of step 3; name a step"):
        load_weights(network(), finished.url, 3)
    with pytest.raises(CheckpointError, match=r"its '0\.weight' has shape \(7, 1\), .* pass the model that the run tr"):
        load_weights(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), finished.url)
    out = Store(str(tmp_path / "out"))
    export_weights(finished, out)
    with pytest.raises(SpecError, match=r"out has 'model\.safetensors' already; name another folder"):
        export_weights(finished, out)
    newest = find_commits(finished)[0][0]
    (file,) = newest.files
    data = bytearray(finished.read(f"{newest.folder}/{file}"))
    data[-1] ^= 1
    finished.write(f"{newest.folder}/{file}", bytes(data))
    with pytest.raises(CheckpointError, match=r"step-00000004-a1/rank-00000.* is damaged.*; name another step \(2\)"):
        load_weights(network(), finished.url)
    assert load_weights(network(), finished.url, 2) == 2


def test_weights_are_loaded_from_s3_and_exported_to_it(finished: Store, s3: Any) -> None:
    there = Store(s3.url("run"))
    for entry in finished.list():
        there.write(entry.name, finished.read(entry.name))
    model, exported = network(), network()
    load_weights(model, there.url)
    export_weights(there, Store(s3.url("out")))
    exported.load_state_dict(load(Store(s3.url("out")).read(ONE_FILE)))
    for one, other in zip(model.parameters(), exported.parameters(), strict=True):
        assert torch.equal(one, other)


class Counting(nn.Module):
    """Module with state that is no weight, a buffer that is made late, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.tied = self.linear
        self.count = 0
        self.register_buffer("late", None)

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "seen": torch.tensor([self.count])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_extra_state_late_buffers_and_tied_weights_are_loaded(
    tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = numbers_job(tmp_path)
    run = cpu_run(job)
    module = Counting()
    model = run.model(module)
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps():
        module.count, module.late = module.count + 1, torch.full((2,), 5.0)
        for batch in step.batches():
            step.backward(module.linear(batch["x"][:, None].expand(-1, 2) / 48).square().mean())
        step.update()
    loaded = Counting()
    load_weights(loaded, job.run_url)
    assert (loaded.count, loaded.late.tolist()) == (4, [5.0, 5.0])
    assert torch.equal(loaded.linear.weight, module.linear.weight)
    exported = export_weights(Store(job.run_url), Store(str(tmp_path / "out")))
    assert load_file(tmp_path / "out" / ONE_FILE).keys() == {"linear.weight", "late"}
    assert exported.left_out == ("_extra_state", "_extra_state.seen")


class Tied(nn.Module):
    """Decoder whose head is its embedding, with two equal tensors that are not tied, and two empty ones."""

    def __init__(self, is_sharded: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 4)
        self.one, self.other = nn.LayerNorm(4), nn.LayerNorm(4)
        self.one.requires_grad_(False)
        self.other.requires_grad_(False)
        self.head = nn.Linear(4, 48, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("none", torch.empty(0))
        if is_sharded:
            fully_shard(self)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.other(self.one(self.embedding(x)))), x)


def _train_tied(rank: int, world_size: int, job: Job, is_sharded: bool) -> None:
    run = cpu_run(job, rank, world_size)
    model = run.model(Tied(is_sharded))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps():
        for batch in step.batches():
            step.backward(model(batch["x"].long()))
        step.update()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_tied_weights_are_stored_once_as_hugging_face_stores_them(tmp_path: Path, is_sharded: bool) -> None:
    job = numbers_job(tmp_path)
    on_ranks(2, _train_tied, job, is_sharded)
    run, out = Store(job.run_url), tmp_path / "out"
    (newest, *_), _ = find_commits(run)
    assert newest.tensors["model.head.weight"] == newest.tensors["model.embedding.weight"]
    for file in newest.files:
        assert "model.head.weight" not in load(run.read(f"{newest.folder}/{file}"))
    exported = export_weights(run, Store(str(out)))
    with safe_open(out / ONE_FILE, "pt") as file:
        assert set(file.keys()) == {
            "embedding.weight",
            *(f"{layer}.{name}" for layer in ("one", "other") for name in ("weight", "bias")),
            *("empty", "none"),
        }
        assert file.metadata()["head.weight"] == "embedding.weight"
    assert exported.tensors == 7
    whole, loaded, plain = Tied(), Tied(), Tied()
    load_weights(whole, run.url)
    load_model(loaded, out / ONE_FILE)
    assert plain.load_state_dict(load_file(out / ONE_FILE), strict=False) == (["head.weight"], [])
    for model in (loaded, plain):
        assert torch.equal(model.head.weight, whole.embedding.weight)


M_MMAP_THRESHOLD = -3
"""Parameter of mallopt() of glibc."""


def _save_large(rank: int, world_size: int, folder: str) -> None:
    """Save a model of 256 MiB."""
    import torch.distributed as dist

    from undula.state.checkpoint import Checkpointer
    from undula.state.pieces import rank_state

    weights = {f"model.{place}": torch.ones(2**22) for place in range(16)}
    checkpoints = Checkpointer(Store(f"{folder}/run"), dist.group.WORLD, attempt=1, keep=1)
    checkpoints.save(1, "plan", rank_state(weights))
    assert checkpoints.wait() is None


def _memory_of_export(rank: int, world_size: int, folder: str, file_bytes: int) -> float:
    """Export the model, and return the memory in MiB that this took beside files, whose pages the system can take back."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)  # freed tensors go back to the system, and are no gaps in a heap
    before, highest, has_ended = _anonymous_mib(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not has_ended.wait(0.001):
            highest = max(highest, _anonymous_mib())

    watching = threading.Thread(target=watch)
    watching.start()
    export_weights(Store(f"{folder}/run"), Store(f"{folder}/{file_bytes}"), file_bytes=file_bytes)
    has_ended.set()
    watching.join()
    return highest - before


def _anonymous_mib() -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:")) / 1024


def test_an_export_holds_one_file_at_a_time(tmp_path: Path) -> None:
    on_ranks(1, _save_large, str(tmp_path))
    (taken,), (of_whole,) = (on_ranks(1, _memory_of_export, str(tmp_path), size) for size in (2**25, 2**30))
    assert taken < 200
    assert of_whole > 250, "one file takes the whole model, and the measure shows it"
