"""Host time that a run adds to a step, beside a plain loop: a GPT with many small parameters, so that the computation takes little.

    python -m tests.baselines.bench_host
    python -m tests.baselines.bench_host --width 768 --context 256 --samples 32      # on a GPU

Every step of the run is followed by a step of the plain loop in the same process, with the same optimizer, clipping and micro-batches, so
that both meet the same machine. The processor time of the training thread is less noisy on a machine that does other work. `--profile`
lists the functions in which the run's steps spend their time, without the plain loop.
"""

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.gpt import GPT, GPTConfig
from tests.baselines.result import print_and_write
from undula.data.prepare.write import write_shards
from undula.data.spec import DataSpec, ValidationSpec
from undula.parallel.spec import GradientSpec
from undula.plan.plan import PlanSpec
from undula.plan.schedule import ScheduleSpec
from undula.state.spec import CheckpointSpec
from undula.storage import Store
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import SingleProcess, local_device

SKIPPED = 20
"""Number of first steps that are not measured."""


def write_tokens(folder: Path, context: int, rows: int) -> Tensor:
    tokens = np.random.default_rng(0).integers(0, 256, (rows, context + 1), dtype=np.uint8)
    table = pa.table({"text": pa.FixedSizeListArray.from_arrays(pa.array(tokens.reshape(-1)), context + 1)})
    write_shards(Store(str(folder / "data")), [table], table.schema, rows, num_shards=4, row_group_bytes=2**20)
    return torch.from_numpy(tokens)


def loss_of(model: Callable[[Tensor], Tensor], text: Tensor) -> Tensor:
    text = text.long()
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def measured(
    options: argparse.Namespace, virtual_workers: int, profile: cProfile.Profile | None = None
) -> dict[str, float]:
    """Return the median times of a step of the run and of the plain loop in ms."""
    device = local_device(0, 1)
    config = GPTConfig(layers=options.layers, heads=2, width=options.width, context=options.context)
    plain = GPT(config).to(device)
    forward = torch.compile(plain, dynamic=False) if options.compile else plain
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=device.type == "cuda")
    times: list[Tensor] = []
    """Times of each step of the run and of the plain loop: on the clock, and of the processor in this thread."""

    def plain_step(tokens: Tensor) -> None:
        losses = []
        for rows in tokens[: options.samples].chunk(virtual_workers):
            losses.append(loss_of(forward, rows.to(device)) / virtual_workers)
            losses[-1].backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.optim.AdamW.step.__wrapped__(plain_optimizer)  # type: ignore[attr-defined]  # a run refuses steps of other optimizers
        plain_optimizer.zero_grad()
        torch.stack(losses).sum().item()

    def train(run: Run) -> None:
        model = run.model(GPT(config))
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr, fused=device.type == "cuda"))
        began = now()
        if profile:
            profile.enable()
        for step in run.steps():
            for batch in step.batches():
                step.backward(loss_of(model, batch["text"]))
            step.update()
            ended = now()
            if not profile:
                plain_step(tokens)
            times.append(torch.stack([ended - began, now() - ended]))
            began = now()
        if profile:
            profile.disable()

    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(Path(folder), options.context, 64 * options.samples)
        job = Job(
            name="host",
            run_url=f"{folder}/run",
            run_id=token_hex(8),
            data=DataSpec(train=f"{folder}/data"),
            plan=PlanSpec(
                global_batch=options.samples,
                virtual_workers=virtual_workers,
                epochs=1000,
                max_steps=options.steps + SKIPPED,
            ),
            deterministic=options.deterministic,
            schedule=ScheduleSpec(base_lr=1e-4),
            gradient=GradientSpec(max_norm=1.0),
            validation=ValidationSpec(),
            checkpoint=CheckpointSpec(every_steps=10**6),
            config={},
            compile=options.compile,
        )
        SingleProcess(train, job, lambda message: None)()
    medians = 1e3 * torch.stack(times[SKIPPED:]).median(0).values
    (ours, ours_cpu), (plain_loop, plain_cpu) = medians.tolist()
    name = f"V={virtual_workers}"
    return {
        f"{name} plain ms": plain_loop,
        f"{name} run ms": ours,
        f"{name} added ms": ours - plain_loop,
        f"{name} added ms of the processor": ours_cpu - plain_cpu,
    }


def now() -> Tensor:
    return torch.tensor([time.perf_counter(), time.thread_time()], dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rounds": 3, "steps": 200, "layers": 12, "width": 16, "context": 16, "samples": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("compile", "deterministic", "profile"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    if options.profile:
        profile = cProfile.Profile()
        measured(options, 4, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)
        return
    rounds = [{**measured(options, 1), **measured(options, 4)} for _ in range(options.rounds)]
    print_and_write("host", rounds)


if __name__ == "__main__":
    main()
