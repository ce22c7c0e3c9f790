"""Errors of estimates of memory, made without the device: ours beside those of DeepSpeed, Accelerate and torch's own tracker.

    python -m tests.baselines.bench_memory

For each of the models of the tests, the peak of a step of one worker with one micro-batch, counted by a dispatch mode during a run on the
CPU, is compared with what each estimate says. DeepSpeed and Accelerate count parameters alone: DeepSpeed 20 bytes for each without sharding
(deepspeed 0.19, runtime/zero/stage_1_and_2.py, estimate_zero2_model_states_mem_needs), Accelerate four times the model
(accelerate/commands/estimate.py, estimate_training_usage). torch's tracker (torch/distributed/_tools/mem_tracker.py) runs a training loop
of plain torch.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.commands.estimate import estimate_training_usage
from rich.console import Console
from rich.table import Table
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.data import DataLoader

from tests.memory_kit import measured, predicted
from tests.memory_models import MODELS, Trained
from undula.data.script.dataset import script_data
from undula.plan.plan import PlanSpec
from undula.train.job import Job

SAMPLES = 16


def job_of(train: Trained, folder: Path) -> Job:
    return Job(
        name="memory",
        run_url=str(folder / "run"),
        plan=PlanSpec(global_batch=SAMPLES, virtual_workers=1, max_steps=3),
        script_data=script_data(train.data(), None, None, 0, {}),  # type: ignore[arg-type]
    )


def of_deepspeed(train: Trained) -> float:
    return 20.0 * sum(each.numel() for each in train.make_model().parameters())


def of_accelerate(train: Trained) -> float:
    size = sum(each.nbytes for each in train.make_model().parameters())
    return float(estimate_training_usage(size, "float32")["step"])


def of_torch(train: Trained) -> float:
    """Return the peak of two steps in plain torch by torch's tracker."""
    model, tracker = train.make_model(), MemTracker()
    optimizer = train.make_optimizer(model)
    tracker.track_external(model, optimizer)
    batches = iter(DataLoader(train.data(), batch_size=SAMPLES))  # type: ignore[arg-type]
    with tracker:
        for _ in range(2):  # the first step makes the state of the optimizer
            train.loss(model, next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    return float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


ESTIMATES: dict[str, Callable[[Trained], float]] = {
    "DeepSpeed": of_deepspeed,
    "Accelerate": of_accelerate,
    "torch": of_torch,
}


def main() -> None:
    table = Table("model", "peak", "Undula", *ESTIMATES)
    with tempfile.TemporaryDirectory() as folder:
        for name, train in MODELS.items():
            job = job_of(train, Path(folder) / name.replace(" ", "-"))
            peak = measured(train, job)
            estimates = [predicted(train, job)[1], *(estimate(train) for estimate in ESTIMATES.values())]
            table.add_row(name, f"{peak / 2**20:.1f} MiB", *(f"{each / peak - 1:+.0%}" for each in estimates))
    Console().print(table)


if __name__ == "__main__":
    main()
