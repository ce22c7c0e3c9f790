"""The main job on a cluster whose size follows recorded traces of spot nodes, compared with plain Ray Train.

    python -m tests.baselines.bench_traces 4:aws-4node.json 2:aws-16node.json

Each trace comes with the most nodes that are used of it. Two stretches of each: sixty changes in `--minutes`, and ten with more than a
minute between them on average, there with no more nodes than this machine has cores: a node that starts takes them from those that
train. Every node that goes has had 20 s of notice. One run of each: it is what came of one sequence of changes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.baselines.result import FOLDER
from undula.data.prepare.corpora import stdlib_text
from undula.testing.faults import parse_trace

JOB = Path(__file__).parents[2] / "jobs" / "language_model.yaml"
CALM_CHANGES = 10
CALM_S = 63.0
"""Average time in seconds between two changes in a calm replay of a trace."""


def replayed(
    trace: Path, most: int, changes: int, seconds: float, data: str, folder: str, trainer: str
) -> dict[str, Any]:
    """Run the job under the part of a trace with a number of changes, replayed in a number of seconds, and return the outcome."""
    recorded = parse_trace(json.loads(trace.read_text()), str(trace)).window(changes, most)
    speedup = len(recorded.counts) * recorded.gap_s / seconds
    command = [
        *(sys.executable, "-m", "undula.cli", "chaos", str(JOB), "--json", "--trace", str(trace)),
        *("--speedup", str(speedup), "--changes", str(changes), "--notice", "20"),
        *([] if trainer == "undula" else ["--baseline", trainer]),
        *(f"data.train={data}/train", "data.validation=null", f"runs={folder}", f"name={trace.stem}-{changes}"),
        *("plan.epochs=1000", "plan.max_steps=1000000", "schedule.decay=constant", "schedule.base_lr=3e-4"),
        *("workers.min=1", f"workers.max={most}"),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found = json.loads(done.stdout)
    outages_s = [outage["seconds"] for outage in found["outages"]]
    return {
        "trace": trace.stem,
        "nodes": most,
        "changes": changes,
        "seconds between changes": seconds / changes,
        "trainer": trainer,
        "steps": found["steps"],
        "steps lost": found["steps_lost"],
        "median outage, s": statistics.median(outages_s or [0.0]),
        "longest outage, s": max(outages_s, default=0.0),
        "of the oracle": found["useful_rank_s"] / found["oracle_rank_s"],
        "certificate": found["certificate"]["holds"],
    }


def as_markdown(rounds: list[dict[str, Any]]) -> str:
    """Return a table with one line per run."""
    lines = [list(rounds[0]), ["---"] * len(rounds[0])]
    for each in rounds:
        lines.append([f"{value:.2f}" if isinstance(value, float) else str(value) for value in each.values()])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", metavar="NODES:FILE")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--stretches", nargs="+", choices=["busy", "calm"], default=["busy", "calm"])
    parser.add_argument("--trainers", nargs="+", default=["undula", "ray"])
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        stdlib_text().write(f"{folder}/data")
        for most, trace in ((int(each.partition(":")[0]), Path(each.partition(":")[2])) for each in options.traces):
            cores = os.cpu_count() or 1
            for stretch, changes, seconds, nodes in (
                ("busy", 60, 60 * options.minutes, most),
                ("calm", CALM_CHANGES, CALM_CHANGES * CALM_S, min(most, cores)),
            ):
                for trainer in options.trainers if stretch in options.stretches else ():
                    rounds.append(replayed(trace, nodes, changes, seconds, f"{folder}/data", folder, trainer))
                    print(json.dumps(rounds[-1]), flush=True)
                    FOLDER.mkdir(parents=True, exist_ok=True)
                    (FOLDER / "traces.json").write_text(json.dumps(rounds, indent=1))
    print(as_markdown(rounds))


if __name__ == "__main__":
    main()
