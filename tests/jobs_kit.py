"""Helpers that run jobs as users do, with a driver in a separate process, and read their runs."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alone import train_alone
from small_text import MODEL, PLAN
from waiting import wait_until

from undula.cluster.local import LocalCluster
from undula.state.commit import find_commits
from undula.state.ledger import Ledger, read_ledger
from undula.storage import Store, open_store

ROOT = Path(__file__).parents[1]
LANGUAGE_MODEL = ROOT / "jobs" / "language_model.py"
SMALL = (*MODEL, *PLAN)
"""Overrides with which the main job takes seconds. The workers read all of its data themselves (data.head_mib)."""
STREAMED = ("data.head_mib=0", "data.read_tasks=1")
"""Overrides with which Ray Data tasks read all of the data. They take seconds to start."""


@dataclass(frozen=True)
class Finished:
    """Driver that has ended."""

    status: int
    out: str
    err: str
    store: Store

    @property
    def ledger(self) -> Ledger:
        return read_ledger(self.store)

    def column(self, name: str) -> list[Any]:
        return self.ledger.steps[name].to_pylist()


@dataclass(frozen=True)
class Jobs:
    """Runner of jobs on a cluster."""

    cluster: LocalCluster
    text: str
    runs: str
    script: Path = LANGUAGE_MODEL
    settings: tuple[str, ...] = SMALL

    def command(self, name: str, *overrides: str) -> list[str]:
        data = (f"data.train={self.text}/train", f"data.validation={self.text}/validation")
        # Options can be mixed with overrides, and the last override of a key wins.
        return [
            self.cluster.python,
            str(self.script),
            f"name={name}",
            f"runs={self.runs}",
            *data,
            *self.settings,
            *overrides,
        ]

    def env(self) -> dict[str, str]:
        return {**os.environ, **self.cluster.env, "RAY_ADDRESS": self.cluster.address}

    def start(self, name: str, *overrides: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.command(name, *overrides),
            env=self.env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: "subprocess.Popen[str]", name: str) -> Finished:
        out, err = process.communicate(timeout=300)
        return Finished(process.returncode, out, err, open_store(f"{self.runs}/{name}"))

    def run(self, name: str, *overrides: str) -> Finished:
        return self.finish(self.start(name, *overrides), name)

    def alone(self, name: str, *overrides: str, world_size: int = 1, until: int | None = None) -> Finished:
        """Train without the cluster, as `train_alone` does."""
        return Finished(0, "", "", train_alone(self.command(name, *overrides), world_size, until))

    def workers(self, count: int) -> tuple[str, str]:
        return (f"workers.min={count}", f"workers.max={count}")

    def past_an_epoch(self) -> tuple[str, ...]:
        """Return overrides for 60 steps with dropout. The 46th step is the short last step of an epoch."""
        data = f"data.train={self.text}/validation"  # a small data set
        return (data, "plan.global_batch=120", "plan.epochs=2", "plan.max_steps=60", "config.model.dropout=0.1")


def await_checkpoint(process: "subprocess.Popen[str]", store: Store, step: int) -> None:
    """Wait until a run has committed a checkpoint of `step` or a later one."""
    wait_until(lambda: any(commit.step >= step for commit in find_commits(store)[0]), 180, process)


def relative_difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference between two series of equal length."""
    assert len(ours) == len(theirs) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def job_json(store: Store) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(store.read("job.json"))
    return body
