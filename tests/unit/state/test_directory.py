"""Tests of the run directory: one job at a time uses it, and only the run's own files are deleted."""

import subprocess
import sys
from pathlib import Path

import pytest

from undula.errors import RunError
from undula.state.directory import delete_run, held
from undula.storage import Store

HOLD = """
import sys
from undula.state.directory import held
from undula.storage import Store
with held(Store(sys.argv[1])):
    print(1, flush=True)
    input()
"""


def test_one_job_holds_the_run_until_it_ends_even_if_it_is_killed(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    other = subprocess.Popen([sys.executable, "-c", HOLD, store.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"1\n"
    with pytest.raises(RunError, match=f"another job is training in {store.url}"), held(store):
        pass
    other.kill()
    other.communicate()
    with held(store):
        pass


def test_delete_run_deletes_the_runs_files_and_no_others(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for name in ("job.json", "ledger/a.parquet", "checkpoints/x/commit.json", "ray/notes", "mine/notes.txt"):
        store.write(name, b"")
    delete_run(store)
    assert [entry.name for entry in store.list()] == ["mine/notes.txt"]


def test_a_directory_without_a_run_is_not_deleted(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("thesis.tex", b"")
    with pytest.raises(RunError, match=r"holds 'thesis.tex' but no run"):
        delete_run(store)
    assert store.exists("thesis.tex")
