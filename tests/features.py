"""Features of runs, each of which must come to the same numbers wherever it trains, and the groups of ranks in which they train.

`tests/unit/train/test_features.py` crosses the rows with world sizes, hand-overs and resumes. Nothing here needs Ray.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import torch
import torch.distributed as dist
from drawn_data import drawn_job
from example_parts import summed
from feature_scripts import (
    Averaged,
    Blocks,
    Counted,
    Counting,
    Embedded,
    Loop,
    Routed,
    Train,
    adamw,
    clamp,
    contrastive,
    distilled,
    drawn,
    named_means,
    normed,
    of_name,
    on_drawn,
    on_tokens,
    overflowing,
    sgd,
    swap_in_and_out,
    two_layers,
    with_dropout,
    with_own_average,
    with_random_numbers,
    without_memory,
    without_samples,
)
from numbers_job import CPU, cpu_run, network, numbers_job
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, SequentialLR, StepLR

from undula.data.spec import ValidationSpec
from undula.parallel.spec import ActivationsSpec, GradientSpec, ShardingSpec
from undula.plan.precision import PrecisionSpec
from undula.plan.schedule import ScheduleSpec
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.state.events import StartEvent, ValidationEvent
from undula.state.ledger import events_of, read_ledger
from undula.state.model_state import names_in_state
from undula.state.spec import CheckpointSpec
from undula.storage import Store
from undula.train import micro_batches, step_part
from undula.train.job import Job
from undula.train.micro_batches import DeviceBatches

SCALE_INTERVAL = 3
"""Number of steps without an overflow after which the loss scale grows."""
Origin: TypeAlias = Literal["the memory of a worker", "the checkpoint", "the memory of a node"]
"""Place from which the next group has the state."""


@dataclass(frozen=True)
class Feature:
    """Train function, and the settings of the job in which it has the feature."""

    train: Train = field(default_factory=Loop)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the job."""
    plan: Mapping[str, Any] = field(default_factory=lambda: {"epochs": 2})
    like: str | None = None
    """Row that has the same numbers on one rank."""
    num_workers: int | None = None
    """Number of loader processes of `on_drawn`, whose dataset replaces the stored one."""

    def job(self, folder: Path) -> Job:
        """Return a job that validates, with a data set of its own."""
        if self.num_workers is not None:
            return drawn_job(folder, self.num_workers)
        job = numbers_job(folder, **self.plan)
        job = replace(job, data=replace(job.data, validation=job.data.train), validation=ValidationSpec(every_steps=2))
        return replace(job, **self.settings)


FP16 = {"precision": PrecisionSpec("fp16")}
OVERFLOWING = {"global_batch": 48, "epochs": 12}
"""Plan of steps that consume all samples and so also the one that overflows."""

SHORT = {"global_batch": 45, "virtual_workers": 5, "epochs": 4}
"""Plan whose every second step has three samples for five virtual workers."""


def ruled(rule: Any) -> dict[str, Any]:
    """Return the settings of a learning rate that follows the measured noise scale by a rule."""
    schedule = ScheduleSpec(base_lr=0.001, base_batch=3, batch_rule=rule)
    return {"schedule": schedule, "gradient": GradientSpec(noise_every_steps=2)}


def blocks(keep: str, like: str | None = "activations=all") -> Feature:
    """Return a row with a policy for activations."""
    return Feature(Loop(Blocks, adamw), {"activations": ActivationsSpec(keep)}, like=like)  # type: ignore[arg-type]


FEATURES: dict[str, Feature] = {
    "plain": Feature(),
    "deterministic": Feature(Loop(Averaged), {"deterministic": True}),
    "buffers": Feature(Loop(Averaged)),
    "counts in buffers": Feature(Loop(Counting)),
    "names by a count": Feature(Loop(Counted, adamw)),
    "an average in the state of the script": Feature(with_own_average),
    "BatchNorm": Feature(Loop(normed(nn.BatchNorm1d))),
    "SyncBatchNorm": Feature(Loop(normed(nn.SyncBatchNorm)), like="BatchNorm"),
    "sparse gradients": Feature(Loop(Embedded, partial(sgd, momentum=0.0))),
    "sharded": Feature(Loop(partial(network, True)), plan={"micro_batch": 2, "epochs": 2}, like="whole"),
    "whole": Feature(plan={"micro_batch": 2, "epochs": 2}),
    "clipped": Feature(settings={"gradient": GradientSpec(max_norm=0.1)}),
    "compressed": Feature(
        settings={"gradient": GradientSpec(compression="bf16")}, plan={"micro_batch": 2, "global_batch": 20, "epochs": 3}
    ),
    "adasum": Feature(settings={"gradient": GradientSpec(reduce="adasum")}),
    "noise scale": Feature(settings={"gradient": GradientSpec(noise_every_steps=1)}),
    "noise scale, sharded": Feature(
        Loop(partial(network, True)), {"gradient": GradientSpec(noise_every_steps=1)}, like="noise scale"
    ),
    "noise scale, uneven micro-batches": Feature(
        settings={"gradient": GradientSpec(noise_every_steps=2)}, plan={"global_batch": 16, "micro_batch": 3, "max_steps": 7, "epochs": 3}
    ),
    "rule noise_scale": Feature(settings=ruled("noise_scale")),
    "rule adascale": Feature(settings=ruled("adascale")),
    "rule surge": Feature(settings=ruled("surge")),
    "bf16": Feature(settings={"precision": PrecisionSpec("bf16")}),
    "bf16, blocks": Feature(Loop(Blocks, adamw), {"precision": PrecisionSpec("bf16")}),
    "fp16": Feature(Loop(two_layers, adamw, overflowing), FP16, OVERFLOWING),
    "fp16, sharded": Feature(Loop(partial(two_layers, True), adamw, overflowing), FP16, OVERFLOWING, like="fp16"),
    "activations=all": blocks("all", like=None),
    "activations=none": blocks("none"),
    "activations=selective": blocks("selective"),
    "activations=sqrt": blocks("sqrt"),
    "offloaded": Feature(settings={"activations": ActivationsSpec("all", offload=True, units=("0", "2"))}, like="plain"),
    "compiled": Feature(Loop(with_dropout, adamw), {"deterministic": True, "compile": True}, {"global_batch": 20, "epochs": 2}),
    "lars": Feature(Loop(optimize=of_name("lars"))),
    "lamb": Feature(Loop(optimize=of_name("lamb"))),
    "one cycle": Feature(Loop(schedule=lambda of: OneCycleLR(of, max_lr=0.2, total_steps=9))),
    "schedulers in sequence": Feature(
        Loop(schedule=lambda of: SequentialLR(of, [LambdaLR(of, lambda k: k / 2), StepLR(of, 1)], milestones=[2]))
    ),
    "mean over tokens": Feature(on_tokens, plan=SHORT),
    "random numbers": Feature(Loop(loss=with_random_numbers, between=lambda: float(drawn()))),
    "named means": Feature(Loop(validate=named_means), plan={"micro_batch": 2, "global_batch": 20, "epochs": 3}),
    "clamped": Feature(Loop(change=clamp)),
    "swapped weights": Feature(Loop(change=swap_in_and_out), like="plain"),
    "contrastive": Feature(Loop(loss=contrastive), plan=SHORT),
    "distilled": Feature(Loop(Blocks, adamw, distilled), plan={"global_batch": 48, "virtual_workers": 6, "epochs": 6}),
    "short last step": Feature(plan={"global_batch": 20, "epochs": 3}),
    "uneven micro-batches": Feature(plan={"global_batch": 16, "micro_batch": 3, "max_steps": 7, "epochs": 3}),
    "no samples": Feature(without_samples(False), plan=SHORT),
    "no samples, sharded": Feature(without_samples(True), plan=SHORT, like="no samples"),
    "samples of the script": Feature(on_drawn, num_workers=0),
    "loader processes": Feature(on_drawn, num_workers=1, like="samples of the script"),
}  # fmt: skip
"""Rows, whose name is the feature."""


def sharded(stage: Literal[1, 2, 3], name: str) -> Feature:
    """Return a row like another one, with a model that the platform shards."""
    row = FEATURES[name]
    return replace(row, settings={**row.settings, "sharding": ShardingSpec(stage)}, like=row.like or name)


FEATURES["experts, heads and skipped blocks"] = Feature(Loop(Routed, adamw))
FEATURES |= {
    f"{name}, sharded in stage {stage}": sharded(stage, name)
    for stage, name in (
        *((1, "plain"), (2, "plain"), (3, "plain")),
        *((1, "BatchNorm"), (3, "BatchNorm"), (2, "clipped"), (1, "short last step"), (2, "short last step")),
        *((3, "uneven micro-batches"), (1, "no samples"), (3, "no samples"), (2, "mean over tokens")),
        *((3, "bf16, blocks"), (2, "fp16"), (3, "fp16"), (3, "activations=sqrt"), (2, "lars"), (3, "lamb")),
        *(
            (3, "contrastive"),
            (1, "distilled"),
            (2, "distilled"),
            (3, "distilled"),
            (3, "random numbers"),
            (2, "loader processes"),
            (3, "counts in buffers"),
            (3, "names by a count"),
        ),
        *((1, "noise scale"), (2, "noise scale, uneven micro-batches"), (3, "noise scale, uneven micro-batches")),
        *((stage, "experts, heads and skipped blocks") for stage in (1, 2, 3)),
        *((2, "rule noise_scale"), (3, "rule adascale"), (1, "compressed"), (2, "compressed"), (3, "compressed")),
        *((stage, "an average in the state of the script") for stage in (1, 2, 3)),
        *((stage, name) for stage in (1, 3) for name in ("clamped", "swapped weights")),
    )
}
FEATURES |= {
    f"{name}, shards in host memory in stage {stage}": replace(
        FEATURES[name], settings={**FEATURES[name].settings, "sharding": ShardingSpec(stage, offload="all")}, like=name
    )
    for stage, name in ((1, "fp16"), (2, "lamb"), (3, "clipped"), (3, "BatchNorm"))
}
FEATURES |= {
    f"drawn by the run in stage {stage}": Feature(
        Loop(without_memory, adamw), {"sharding": ShardingSpec(stage)}, like="drawn by the run in stage 1" if stage > 1 else None
    )
    for stage in (1, 2, 3)
}  # fmt: skip
FEATURES["rows of virtual workers"] = Feature(summed)
FEATURES |= {
    f"rows of virtual workers, sharded in stage {stage}": Feature(
        summed,
        {"sharding": ShardingSpec(stage)},
        like="rows of virtual workers",
    )
    for stage in (1, 2)
}
FEATURES["16-bit gathers"] = Feature(
    Loop(network, adamw), {"precision": PrecisionSpec("bf16"), "sharding": ShardingSpec(3, gather="compute")}
)


@dataclass(frozen=True)
class Group:
    """Ranks of a run that train together, as each of them is told how."""

    leaves_after: int | None = None
    """Number of steps after which they leave; None to train to the end of the plan."""
    origin: Origin = "the memory of a worker"
    """Place in which they leave the state."""


def train_in_groups(
    rank: int,
    world_size: int,
    jobs: Mapping[str, Job],
    groups: Sequence[Group] = (Group(),),
    default_device: str | None = None,
    reads_ahead: bool | None = None,
    device: torch.device = CPU,
) -> dict[str, dict[str, list[Any]]]:
    """Train each row in one group after another, and return the state of its model at the end, by row and by name.

    Args:
        rank: Rank of this process in all groups.
        world_size: Number of ranks, which have a process group.
        jobs: Job of each row.
        groups: Groups of these ranks.
        default_device: Default device of torch that the scripts set. On `meta`, which stands for a GPU, a tensor that the library should
            have made in host memory has no values.
        reads_ahead: Whether micro-batches are read before they are needed, as on a GPU.
        device: Device of this rank.
    """
    states: dict[str, dict[str, list[Any]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_part, "GROWTH_INTERVAL", SCALE_INTERVAL)
        patch.setattr(micro_batches, "DeviceBatches", partial(DeviceBatches, reads_ahead=reads_ahead))
        for name, job in jobs.items():
            worker = WorkerState(is_run=True, controller=object())
            torch.set_default_device(default_device)
            try:
                for group in groups:
                    states[name] = _train(rank, world_size, name, job, group, worker, device)
                    if group.origin != "the memory of a worker":
                        worker.held = None
            except BaseException as error:
                error.add_note(f"in the row {name!r}")
                raise
            finally:
                worker.close_kept()
                torch.set_default_device(None)
                torch.use_deterministic_algorithms(False)
            dist.barrier()
    return states


def _train(
    rank: int, world_size: int, name: str, job: Job, group: Group, worker: WorkerState, device: torch.device
) -> dict[str, list[Any]]:
    """Train a row in a group, and return the state of its model at the end."""
    copies = 1 if group.origin == "the memory of a node" else 0
    job = replace(job, checkpoint=CheckpointSpec(every_steps=10**6, snapshot_every_steps=copies))
    worker.join_group()
    run = cpu_run(job, rank, world_size, worker, device=device)

    def ends(index: int) -> None:
        leaves = index + 1 == group.leaves_after
        worker.request = Request(leaves=leaves, saves=leaves and group.origin == "the checkpoint")

    with suppress(LeaveGroup):
        FEATURES[name].train(run, ends)
    run.hand_over()
    module = run._loop.model.module  # type: ignore[union-attr]
    name_of = names_in_state(module)
    state = {
        name_of(key): getattr(value, "full_tensor", lambda value=value: value)().double().flatten().tolist()
        for key, value in module.state_dict().items()
    }
    run.free()
    return state


def numbers_of(job: Job) -> dict[str, list[Any]]:
    """Return the numbers in the ledger of a run, by name."""
    ledger = read_ledger(Store(job.run_url))
    columns = ("loss", "grad_norm", "lr", "applied", "step_samples", "sample_digest", "weights_digest")
    numbers = {name: ledger.steps[name].to_pylist() for name in columns}
    for key, rows in {
        "logged": [json.loads(row) for row in ledger.steps["logged"].to_pylist()],
        "validation": [{"step": event.step, **event.means} for event in events_of(ledger.events, ValidationEvent)],
    }.items():
        for name in sorted({name for row in rows for name in row}):
            numbers[f"{key}.{name}"] = [row.get(name) for row in rows]
    return numbers


def origins_of(job: Job) -> list[str | None]:
    """Return the places from which the groups of a run had its state."""
    return [event.origin for event in events_of(read_ledger(Store(job.run_url)).events, StartEvent)]
