"""Pauses of a sharded model when its workers change by plan, by the size of its state: Undula, and Ray Train with FSDP2 and checkpoints.

    python -m tests.baselines.bench_pauses

The main job's model in stage 3 on nodes of one CPU each, of which one or two are there. A node is added, the node of rank 1 gets a notice
of 30 s, a node is added again, and the node of rank 0 gets a notice. Pause: the time between the last step of a group and the first step of
the next one, without the median step of the latter. Ray Train saves a checkpoint every 10 steps, and the steps since the last one are lost.

Each change moves half of the state, the parameters and moments of AdamW, to a rank that lacks it. The bound of a pause is 0.8 s plus
the time for these bytes at half of the bandwidth that gloo has between two processes.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from jobs.gpt import GPT, GPTConfig
from tests.baselines.bench_elastic import (
    HERE,
    ROOT,
    STEPS_AFTER,
    Job,
    Made,
    client_env,
    drain_and_kill,
    ledger_steps,
    lines,
)
from tests.baselines.result import FOLDER, print_and_write
from tests.ranks import on_ranks
from undula.data.prepare.corpora import stdlib_text
from undula.report.render.axes import log_axis
from undula.report.render.chart import Chart, Key, Layer, Line, Points
from undula.report.render.html import render_chart
from undula.state.events import GroupEvent, StartEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import open_store
from undula.testing.nodes import Nodes, nodes

CONTEXT = 32
MODELS = {
    "20 MB": GPTConfig(layers=8, width=128, context=CONTEXT),
    "200 MB": GPTConfig(layers=8, width=416, context=CONTEXT),
    "1 GB": GPTConfig(layers=8, width=928, context=CONTEXT),
}
NOTICE_S = 30.0
FIXED_S = 0.8
"""Bound of a pause in seconds, without the time for the bytes that are moved."""
MESSAGE_BYTES = 64 * 2**20
CHANGES = ("node added", "notice to rank 1", "node added again", "notice to rank 0")
LABELS = {"undula": "Undula", "ray": "Ray Train with FSDP2"}
COLORS = {"undula": "#0b62c4", "ray": "#c2410c", "bound": "#6b7280"}


@dataclass(frozen=True)
class Contender:
    """Job that trains a sharded model.

    Attributes:
        job: The job.
        node_of: Function that returns the id of the node of a rank.
        parts: Function that returns the parts of the pause between two steps in seconds, by name.
    """

    job: Job
    node_of: Callable[[int], str]
    parts: Callable[[Made, Made], dict[str, float]] = lambda earlier, later: {}


def undula_contender(cluster: Nodes, data: str, folder: str, model: GPTConfig) -> Contender:
    command = [
        *(sys.executable, str(ROOT / "jobs" / "language_model.py"), "name=job", f"runs={folder}", "sharding.stage=3"),
        *(f"data.train={data}/train", "data.validation=null", "plan.max_steps=100000", "schedule.decay=constant"),
        *("schedule.base_lr=3e-4", "plan.global_batch=2", "plan.virtual_workers=2", "checkpoint.every_steps=100000"),
        *("workers.min=1", "workers.max=2", "workers.grow=always"),
        *(f"config.model.{name}={value}" for name, value in asdict(model).items()),
    ]
    store = open_store(f"{folder}/job")

    def node_of(rank: int) -> str:
        group = list(events_of(read_ledger(store).events, GroupEvent))[-1]
        return next(worker["node"] for worker in group.workers if worker["rank"] == rank)

    def parts(earlier: Made, later: Made) -> dict[str, float]:
        events = read_ledger(store).events
        group, start = (
            max((each.time for each in events_of(events, kind) if each.time < later.time), default=later.time)
            for kind in (GroupEvent, StartEvent)
        )
        return {"to the group": group - earlier.time, "to the state": start - group, "to the step": later.time - start}

    return Contender(Job(command, client_env(cluster), lambda: ledger_steps(store)), node_of, parts)


def ray_contender(cluster: Nodes, data: str, folder: str, model: GPTConfig) -> Contender:
    out = Path(folder) / "steps.jsonl"
    script = str(HERE / "elastic_fsdp.py")
    command = [sys.executable, script, f"{data}/train", str(out), folder, json.dumps(asdict(model))]
    job = Job(command, client_env(cluster), lambda: lines(out))
    return Contender(job, lambda rank: out.with_name(f"rank-{rank}").read_text())


CONTENDERS = {"undula": undula_contender, "ray": ray_contender}


def state_bytes(model: GPTConfig) -> int:
    """Return the size of parameters and both moments of AdamW in bytes."""
    with torch.device("meta"):
        return 3 * sum(parameter.nbytes for parameter in GPT(model).parameters())


def pauses(name: str, size: str, data: str, settle_steps: int) -> dict[str, float]:
    """Return the figures of all changes of a contender, with a number of steps before each."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, nodes() as cluster, ExitStack() as stack:
        cluster.add()
        cluster.await_all()
        contender = CONTENDERS[name](cluster, data, folder, MODELS[size])
        stack.callback(contender.job.stop)

        def change(what: str, before: int, after: int, happens: Callable[[], object]) -> None:
            contender.job.await_steps(settle_steps, before, time.time())
            key = f"{name}, {size}, {what}"
            for figure, value in figures_of(contender, after, happens).items():
                figures[f"{key}: {figure}"] = value
                print(f"{key}: {figure} {value:.2f}", flush=True)

        def notice(rank: int) -> None:
            node = contender.node_of(rank)
            drain_and_kill(cluster, node, NOTICE_S)
            stack.callback(cluster.kill, node)

        growth, of_rank_1, growth_again, of_rank_0 = CHANGES
        change(growth, 1, 2, cluster.add)
        change(of_rank_1, 2, 1, lambda: notice(1))
        change(growth_again, 1, 2, cluster.add)
        change(of_rank_0, 2, 1, lambda: notice(0))
    return figures


def figures_of(contender: Contender, after: int, happens: Callable[[], object]) -> dict[str, float]:
    """Cause a change, and return the pause and its parts in seconds, and the number of lost steps."""
    began = time.time()
    happens()
    made = contender.job.await_steps(STEPS_AFTER, after, began)
    # Not the longest time between any two steps: a step of a large model can take longer than a pause on a busy machine.
    earlier, later = next(
        pair for pair in pairwise(made) if pair[1].time > began and pair[0].world != pair[1].world == after
    )
    times = [each.time for each in made if each.time >= later.time]
    step = statistics.median(second - first for first, second in pairwise(times))
    lost = max(each.step for each in made if each.time <= earlier.time) + 1 - later.step
    pause = later.time - earlier.time - step
    return {"pause, s": pause, "steps lost": lost, "step, s": step, **contender.parts(earlier, later)}


def bandwidth() -> float:
    """Return the bytes per second that gloo moves from one process to another over loopback, the median of 9 messages."""
    return min(on_ranks(2, message_rate))


def message_rate(rank: int, world_size: int) -> float:
    message = torch.ones(MESSAGE_BYTES, dtype=torch.uint8)
    seconds = []
    for _ in range(10):
        dist.barrier()
        began = time.perf_counter()
        work = dist.isend(message, 1) if rank == 0 else dist.irecv(message, 0)
        assert work is not None
        work.wait()
        seconds.append(time.perf_counter() - began)
    return MESSAGE_BYTES / statistics.median(seconds[1:])


def figure(figures: dict[str, float], names: Sequence[str], sizes: Sequence[str]) -> str:
    """Draw the pauses over the size of the state as SVG: a point for each measured change, and a curve through the medians."""
    size_mb = [2 * figures[f"{size}: moved, MB"] for size in sizes]
    bounds = [figures[f"{size}: bound of the pause, s"] for size in sizes]
    layers: list[Layer] = [Line(np.array(size_mb), np.array(bounds), "bound", dash="5 4")]
    keys = [Key("bound", "bound", is_line=True, dash="5 4")]
    every: list[float] = [*bounds]
    for name in names:
        keys_of_size = [[f"{name}, {size}, {change}: pause, s" for change in CHANGES] for size in sizes]
        pauses_s = [[figures[key] for key in keys_of if key in figures] for keys_of in keys_of_size]
        medians = np.array([statistics.median(of_size) for of_size in pauses_s])
        xs = [mb for mb, of_size in zip(size_mb, pauses_s, strict=True) for _ in of_size]
        every += chain.from_iterable(pauses_s)
        layers += [Line(np.array(size_mb), medians, name), Points(xs, list(chain.from_iterable(pauses_s)), name, "dot")]
        keys.append(Key(LABELS[name], name, "dot", is_line=True))
    x = log_axis(min(size_mb), max(size_mb), "parameters and moments in MB")
    y = log_axis(min(every), max(every), "pause in seconds")
    style = "".join(f".{name} {{ color: {color}; }} " for name, color in COLORS.items())
    return render_chart(Chart(x, y, layers, keys, title="Pause of a planned change of a sharded model"), style)


def medians_of(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def comparison(figures: dict[str, float], names: Sequence[str], sizes: Sequence[str]) -> Table:
    """Return a table of the pauses in seconds beside their bounds, with the steps lost in brackets."""
    table = Table("state", "moved, MB", "change", "bound", *(LABELS[name] for name in names), title="pauses in seconds")
    for size in sizes:
        moved, bound = f"{figures[f'{size}: moved, MB']:.0f}", f"{figures[f'{size}: bound of the pause, s']:.2f}"
        for change in CHANGES:
            keys = [f"{name}, {size}, {change}" for name in names]
            cells = [f"{figures[f'{key}: pause, s']:.2f} ({figures[f'{key}: steps lost']:.0f})" for key in keys]
            table.add_row(size, moved, change, bound, *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--settle-steps",
        type=int,
        default=12,
        help="steps before each change, more than between two checkpoints of Ray Train",
    )
    parser.add_argument("--sizes", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    options = parser.parse_args()
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        stdlib_text(CONTEXT).write(folder)
        try:
            for number in range(options.rounds):
                rate = bandwidth()
                rounds.append({"bandwidth, MB/s": rate / 1e6})
                for size in options.sizes:
                    moved = state_bytes(MODELS[size]) / 2
                    rounds[-1][f"{size}: moved, MB"] = moved / 1e6
                    rounds[-1][f"{size}: bound of the pause, s"] = FIXED_S + moved / (rate / 2)
                    for name in options.contenders:
                        print(f"round {number + 1}, {size}, {name}, load {os.getloadavg()[0]:.1f}", flush=True)
                        rounds[-1].update(pauses(name, size, folder, options.settle_steps))
        finally:  # figures outlast a contender that does not come up
            print_and_write("pauses", [each for each in rounds if each.keys() == rounds[0].keys()])
    medians = medians_of(rounds)
    Console().print(comparison(medians, options.contenders, options.sizes))
    (FOLDER / "pauses.svg").write_text(figure(medians, options.contenders, options.sizes))


if __name__ == "__main__":
    main()
