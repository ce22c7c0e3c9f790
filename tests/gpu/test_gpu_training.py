"""Tests of whole runs on a GPU: compiled, with each policy for activations, with ranks that share the GPU, and one group after another.

Where there is no GPU, they train a smaller model on the CPU, and measure nothing.
"""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import which

import pytest
import torch
import torch.nn.functional as F
from conformance_cases import ALL, write_job
from numbers_job import numbers_job
from torch import Tensor

from undula.parallel.spec import ActivationsSpec, ShardingSpec
from undula.plan.precision import PrecisionSpec
from undula.recovery.snapshot_writer import COST, SnapshotWriter
from undula.state.events import SnapshotEvent
from undula.state.ledger import read_ledger
from undula.state.pieces import rank_state
from undula.storage import open_store
from undula.telemetry.messages import Message
from undula.testing.conformance import check, check_on_ranks
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import SingleProcess

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs"))
from gpt import GPT, GPTConfig

LARGE, SMALL = GPTConfig(layers=12, heads=12, width=768, context=1024), GPTConfig(layers=4, width=16, context=16)
"""Model on a GPU, whose blocks are those of a GPT with 124 M parameters, and on a CPU."""
GROUPS = 10
EPOCH = 48
"""Number of samples of the data set."""


def train(run: Run, config: GPTConfig | None = None) -> None:
    """Train a GPT on sequences of bytes that follow from a number."""
    config = config or (LARGE if run.device.type == "cuda" else SMALL)
    model = run.model(GPT(config))
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    places = torch.arange(config.context, device=run.device)
    for step in run.steps():
        for batch in step.batches():
            x = batch["x"]
            assert isinstance(x, Tensor)
            text = (x.long()[:, None] + 1) * places % 251
            step.backward(F.cross_entropy(model(text).flatten(0, 1), text.flatten()))
        step.update()


def gpt_job(folder: Path, steps: int) -> Job:
    job = numbers_job(folder, global_batch=8, virtual_workers=1, epochs=-(-steps * 8 // EPOCH))
    return replace(job, precision=PrecisionSpec(compute="bf16"), checkpoint=replace(job.checkpoint, every_steps=10**6))


def losses(job: Job) -> list[float]:
    return [float(loss) for loss in read_ledger(open_store(job.run_url)).steps["loss"].to_pylist()]


def peak_bytes(device: torch.device, work: Callable[[], None]) -> int:
    """Return the most memory of the GPU that is in use during `work`; 0 without a GPU."""
    if device.type != "cuda":
        work()
        return 0
    gc.collect()  # the model of the work before may be part of a reference cycle
    torch.cuda.synchronize(device)  # begins to use the GPU if no test has done so
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device)


def test_each_policy_for_activations_gives_the_same_losses_in_less_memory(
    any_device: torch.device, figures: dict[str, float], tmp_path: Path
) -> None:
    found, peaks = {}, {}
    for keep in ("all", "selective", "sqrt", "none"):
        # Otherwise the backward pass of an attention adds up in any order on a GPU.
        job = replace(gpt_job(tmp_path / keep, EPOCH // 8), activations=ActivationsSpec(keep=keep), deterministic=True)
        try:
            peaks[keep] = peak_bytes(any_device, SingleProcess(train, job, lambda message: None, device=any_device))
        finally:
            torch.use_deterministic_algorithms(False)
        found[keep] = losses(job)
    assert len(found["all"]) == EPOCH // 8
    assert all(each == found["all"] for each in found.values())
    if any_device.type == "cuda":
        figures.update({f"peak memory with activations.keep={keep}, GiB": peak / 2**30 for keep, peak in peaks.items()})
        assert peaks["none"] < peaks["sqrt"] < peaks["all"]
        assert peaks["selective"] < peaks["all"]


@pytest.mark.skipif(which("g++") is None, reason="g++ is not installed")
def test_a_sharded_model_has_the_bits_of_a_whole_one(any_device: torch.device, tmp_path: Path) -> None:
    found = {}
    for stage in (0, 1, 3):
        sharding = ShardingSpec(stage)  # type: ignore[arg-type]
        job = replace(gpt_job(tmp_path / str(stage), EPOCH // 8), sharding=sharding, deterministic=True)
        try:
            SingleProcess(train, job, lambda message: None, device=any_device)()
        finally:
            torch.use_deterministic_algorithms(False)
        steps = read_ledger(open_store(job.run_url)).steps
        found[stage] = [steps[name].to_pylist() for name in ("loss", "grad_norm", "weights_digest")]
    assert found[0] == found[1] == found[3]


@pytest.mark.skipif(which("g++") is None, reason="g++ is not installed")
def test_shards_in_host_memory_train_the_same_model_in_less_memory_of_the_device(
    any_device: torch.device, tmp_path: Path
) -> None:
    losses, peaks = {}, {}
    for offload in ("none", "all"):
        sharding = ShardingSpec(3, offload=offload)  # type: ignore[arg-type]
        job = replace(gpt_job(tmp_path / offload, EPOCH // 8), sharding=sharding)
        if any_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        SingleProcess(train, job, lambda message: None, device=any_device)()
        if any_device.type == "cuda":
            peaks[offload] = torch.cuda.max_memory_allocated()
        losses[offload] = read_ledger(open_store(job.run_url)).steps["loss"].to_pylist()
    assert losses["all"] == pytest.approx(losses["none"], rel=1e-4)
    if peaks:
        assert peaks["all"] < peaks["none"]


def test_a_compiled_run_resumes_exactly_after_every_step(any_device: torch.device, tmp_path: Path) -> None:
    check(ALL["plain"], write_job(tmp_path), "plan.max_steps=2", "compile=true", "deterministic=true")


def test_ranks_that_share_a_gpu_survive_loss_growth_and_departures(any_device: torch.device, tmp_path: Path) -> None:
    """With two GPUs, each rank has its own."""
    shared = any_device if torch.cuda.device_count() < 2 else None
    check_on_ranks(ALL["plain"], write_job(tmp_path), "deterministic=true", device=shared)


def test_ten_groups_in_one_process_leave_no_memory_behind(any_device: torch.device, tmp_path: Path) -> None:
    job = gpt_job(tmp_path, steps=2 * GROUPS)
    used = []

    def train_two_steps(run: Run) -> None:
        process.leave()  # at the end of the first step
        train(run)

    process = SingleProcess(train_two_steps, job, lambda message: None, device=any_device)
    for done in range(1, GROUPS + 1):
        process()
        gc.collect()
        assert len(losses(job)) == done
        assert not any(isinstance(each, GPT) for each in gc.get_objects())
        used.append(torch.cuda.memory_allocated(any_device) if any_device.type == "cuda" else 0)
    assert len(set(used[2:])) == 1, f"bytes after each group: {used}"


def test_snapshots_cost_at_most_their_share_of_the_time(
    device: torch.device, figures: dict[str, float], tmp_path: Path
) -> None:
    """The model is small: where the state is large and steps are short, minutes pass until enough snapshots were taken."""
    events: list[SnapshotEvent] = []

    def publish(message: Message) -> None:
        if isinstance(message, SnapshotEvent):
            events.append(message)
            process.leave()

    process = SingleProcess(partial(train, config=GPTConfig()), gpt_job(tmp_path, 20_000), publish, device=device)
    process()
    (event,) = events
    figures.update({"snapshots, share of the time": event.share, "snapshots, steps between": event.every_steps})
    assert event.share <= COST


def test_a_snapshot_is_copied_at_the_speed_of_the_bus(
    device: torch.device, figures: dict[str, float], tmp_path: Path
) -> None:
    state = rank_state({"model.w": torch.ones(2**28, device=device)})
    writer = SnapshotWriter(tmp_path / "run", "plan", every_steps=1)
    seconds = []
    for step in range(1, 4):
        began = time.perf_counter()
        writer.begin(step, state, {}, [])
        held_up = time.perf_counter() - began
        writer.wait()
        seconds.append((time.perf_counter() - began, held_up))
    writer.close()
    total_s, held_up_s = min(seconds)
    figures.update(
        {"snapshot of 1 GiB, GiB/s": 1 / total_s, "snapshot of 1 GiB, seconds that the step waits": held_up_s}
    )
    assert held_up_s < total_s
