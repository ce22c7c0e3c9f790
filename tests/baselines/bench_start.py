"""The time that a person waits: runs of three steps from the command to the first step, from the last step to the prompt, and in all.

    make bench-start

`undula run` with a cluster of its own and `undula run --in-process`, beside the same loop under torchrun, in turn. Ours validate once
before the first step and once after the last, and save a checkpoint, as users have them; `--without-validation` leaves the validations out,
which the hand-written loop does not have. The first step counts as made when it has been committed.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.baselines.result import print_and_write
from undula.data.prepare.corpora import stdlib_text
from undula.state.ledger import read_ledger
from undula.storage import open_store

ROOT = Path(__file__).parents[2]
STEPS = 3


def ours(data: str, folder: str, *options: str) -> dict[str, float]:
    """Return the seconds of a run of ours."""
    command = [
        *(sys.executable, "-m", "undula.cli", "run", str(ROOT / "jobs" / "language_model.yaml"), "--fresh"),
        *(f"runs={folder}", "name=start", f"plan.max_steps={STEPS}", f"data.train={data}/train", *options),
    ]
    began = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    ended = time.time()
    times = read_ledger(open_store(f"{folder}/start")).steps["time"].to_pylist()
    return {"first step": times[0] - began, "after the last step": ended - times[-1], "in all": ended - began}


def torchrun(data: str, folder: str, workers: int) -> float:
    """Return the seconds of the hand-written loop."""
    began = time.time()
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers}", "--standalone"),
            *(str(ROOT / "tests" / "baselines" / "plain_loop.py"), "--data", f"{data}/train"),
            *("--steps", str(STEPS), "--out", f"{folder}/times.json"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--without-validation", action="store_true")
    options = parser.parse_args()
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/data"
        stdlib_text().write(data)
        validation = "null" if options.without_validation else f"{data}/validation"
        common = (f"data.validation={validation}", f"workers.max={options.workers}")
        for _ in range(options.rounds):
            figures = {"torchrun, in all": torchrun(data, folder, options.workers)}
            for name, more in {"undula run": (), "in process": ("--in-process",)}.items():
                figures |= {f"{name}, {key}": seconds for key, seconds in ours(data, folder, *common, *more).items()}
            rounds.append(figures)
    print_and_write("start", rounds)


if __name__ == "__main__":
    main()
