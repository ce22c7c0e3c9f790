"""Tests of the registry of trackers: what a tracker needs is in one module, also in that of another package."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_rows import Rows
from outside import installed

from undula.state.directory import JOB_FILE
from undula.storage import Store
from undula.telemetry.registry import ENTRIES, SETTINGS

PACKAGE = Path(__file__).parents[3] / "platform" / "undula"
MODULE = '''
"""Tracker that writes a CSV file."""

import csv
from pathlib import Path

from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT, SpecError
from undula.telemetry.tracker import Entry


@checked_dataclass(frozen=True, config=STRICT)
class CsvSpec:
    """CSV file that shows the losses."""

    file: str
    """Path of the file."""


class CsvTracker:
    name = "CSV"

    def __init__(self, spec):
        self._file = Path(spec.file)

    def check(self):
        if not self._file.parent.is_dir():
            raise SpecError("file lies in no folder; create it")

    def open(self, run):
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return int(lines[-1].split(",")[0]) if lines else None

    def send(self, steps):
        with self._file.open("a") as opened:
            csv.writer(opened).writerows((step.step, step.values["loss/train"]) for step in steps)

    def close(self, state): ...


ENTRY = Entry(lambda spec, _: CsvTracker(spec), CsvSpec)
'''
JOB = """
import sys
from pathlib import Path

from undula.cli.reference import markdown
from undula.config.job import load_spec
from undula.driver.trackers import checked_trackers, send_rest
from undula.errors import SpecError
from undula.storage import Store

job, store, *settings = Path(sys.argv[1]), Store(sys.argv[2]), *sys.argv[3:]
for setting in settings:
    try:
        loaded = load_spec(job, [setting])
        print(send_rest(checked_trackers(loaded, store), store))
    except SpecError as error:
        print(error)
print(loaded.tree()["trackers"]["csv_file"])
print([line for line in markdown().splitlines() if "csv_file" in line])
"""


def test_a_module_is_all_that_a_tracker_needs(tmp_path: Path) -> None:
    """It brings its key, its settings with their checks and their documentation, its own checks, and its writer."""
    outside = installed(tmp_path, "csv_tracker", MODULE, "undula.trackers", csv_file="csv_tracker:ENTRY")
    job, store = tmp_path / "job.yaml", Store(str(tmp_path / "run"))
    job.write_text("name: run\ndata: {train: somewhere}\n")
    record = {"id": "0123abcd", "name": "run", "began": 0.0, "spec": {}, "plan_digest": 7}
    store.write(JOB_FILE, json.dumps(record).encode())
    Rows(store).add(3)
    file = store.path("losses.csv")
    settings = ("csv_file.path=x", "neptune={}", "csv_file.file=/nowhere/losses.csv", f"csv_file.file={file}")
    command = [
        sys.executable,
        "-c",
        JOB,
        str(job),
        store.url,
        *(f"trackers.{each}" for each in settings),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=outside)
    assert done.returncode == 0, done.stderr
    *answers, documentation = done.stdout.splitlines()
    assert answers == [
        "command line: unknown key trackers.csv_file.path: known keys: file",
        f"command line: unknown key trackers.neptune: known keys: {', '.join(sorted(['csv_file', *SETTINGS]))}",
        "command line: trackers.csv_file: file lies in no folder; create it",
        "[]",  # nothing is left to send
        str({"file": file}),
    ]
    assert "| `trackers.csv_file` | mapping or `null` | `null` | CSV file that shows the losses. |" in documentation
    assert "| `trackers.csv_file.file` | string | required | Path of the file. |" in documentation
    assert Path(file).read_text().split() == ["1,1.0", "2,1.0", "3,1.0"]


@pytest.mark.parametrize("key", ENTRIES)
def test_no_other_module_imports_that_of_a_tracker(key: str) -> None:
    mention = re.compile(rf"telemetry\.trackers\.{key}|telemetry\.trackers import .*{key}")
    assert [path for path in PACKAGE.rglob("*.py") if mention.search(path.read_text())] == []
