"""Helpers that run a small study of the main job as users do."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from jobs_kit import LANGUAGE_MODEL
from small_text import CONTEXT
from waiting import wait_until

from undula.cluster.local import LocalCluster
from undula.state.heartbeat import HEARTBEAT_FILE
from undula.storage import Store, open_store
from undula.study.progress import read_progress
from undula.study.records import OUTCOME, TRIALS, read_spec
from undula.study.trials import trial_row

STUDY: Mapping[str, Any] = {
    "job": str(LANGUAGE_MODEL.with_suffix(".yaml")),
    "batches": [12, 24],
    "base_lrs": [1e-3, 1e-2, 1e-1],
    "optimizers": ["adamw"],
    "samples": 960,
    "measurements": 4,
    "target": 4.0,
    "max_concurrent": 2,
}


@dataclass(frozen=True)
class Studies:
    """Runner of studies on a cluster."""

    cluster: LocalCluster
    text: str
    folder: Path

    def file(self, name: str, **keys: Any) -> Path:
        overrides = {
            "runs": str(self.folder),
            "data.train": f"{self.text}/train",
            "data.validation": f"{self.text}/validation",
            "plan.virtual_workers": 2,
            "config.model.layers": 1,
            "config.model.width": 32,
            "config.model.context": CONTEXT,
            **({} if "warmups" in keys else {"schedule.warmup_samples": 0}),
            "validation.samples": 96,
            **keys.pop("overrides", {}),
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(json.dumps({"name": name, **STUDY, **keys, "overrides": overrides}))
        return file

    def start(self, file: Path, *options: str, script: Path = LANGUAGE_MODEL) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [self.cluster.python, str(script), "--study", str(file), *options],
            env={**os.environ, **self.cluster.env, "RAY_ADDRESS": self.cluster.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # Tests in the background may have SIGINT ignored, which child processes inherit.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, file: Path, *options: str, script: Path = LANGUAGE_MODEL, status: int = 0) -> str:
        """Run a study and return what it printed."""
        out, _ = (driver := self.start(file, *options, script=script)).communicate(timeout=300)
        assert driver.returncode == status, out[-3000:]
        return out

    def store(self, name: str) -> Store:
        return open_store(str(self.folder / name))

    def table(self, name: str) -> list[dict[str, Any]]:
        """Return the row of every trial, without measured times."""
        store = self.store(name)
        spec = read_spec(store)
        rows = [trial_row(spec, record) for record in read_progress(store, spec).records.values()]
        return [{key: value for key, value in row.items() if not key.endswith("seconds")} for row in rows]

    def outcomes(self, name: str) -> dict[str, int]:
        """Return the trials that have ended, and the modification time of each outcome in nanoseconds."""
        return {
            file.parent.name: file.stat().st_mtime_ns for file in (self.folder / name).glob(f"{TRIALS}/*/{OUTCOME}")
        }

    def await_outcomes(self, driver: "subprocess.Popen[str]", name: str, count: int) -> None:
        """Wait until trials have ended, and until the driver trains: before that, it does not answer signals as a study does."""
        heartbeat, start = self.folder / name / HEARTBEAT_FILE, psutil.Process(driver.pid).create_time()
        wait_until(lambda: heartbeat.exists() and heartbeat.stat().st_mtime > start, 180, driver)
        wait_until(lambda: len(self.outcomes(name)) >= count, 180, driver)
