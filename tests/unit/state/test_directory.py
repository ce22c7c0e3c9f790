"""The run directory: one job at a time, and nothing of anybody else's is deleted."""

import subprocess
import sys
from pathlib import Path

import pytest

from undula.errors import RunError
from undula.state.directory import forget, held
from undula.storage import Store

HOLD = """
import sys
from undula.state.directory import held
from undula.storage import Store
with held(Store(sys.argv[1])):
    print(1, flush=True)
    input()
"""


def test_a_run_is_held_by_one_job_until_it_ends_even_by_sigkill(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    other = subprocess.Popen([sys.executable, "-c", HOLD, store.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"1\n"
    with pytest.raises(RunError, match="is being trained by another job"), held(store):
        pass
    other.kill()
    other.communicate()
    with held(store):
        pass


def test_forget_deletes_what_a_run_put_there_and_nothing_else(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for name in ("job.json", "ledger/a.parquet", "checkpoints/x/commit.json", "ray/notes", "mine/notes.txt"):
        store.write(name, b"")
    forget(store)
    assert [entry.name for entry in store.list()] == ["mine/notes.txt"]


def test_a_directory_that_holds_no_run_is_left_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("thesis.tex", b"")
    with pytest.raises(RunError, match=r"holds 'thesis.tex' and no run"):
        forget(store)
    assert store.exists("thesis.tex")
