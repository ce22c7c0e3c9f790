"""Tests of the run directory: one job at a time uses it, and only the run's own files are deleted."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
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


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_run_trains_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, "no locks")

    monkeypatch.setattr("fcntl.flock", flock)
    with held(Store(str(tmp_path))):
        pass


TAKE_AS_ANOTHER_USER = """
import os, sys
from undula.errors import RunError
from undula.state.directory import held
from undula.storage import Store
os.setgid(65534)
os.setuid(65534)
try:
    with held(Store(sys.argv[1])):
        print("held")
except RunError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_lock_can_be_taken_if_it_is_readable(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp())  # pytest's folder is this user's alone
    try:
        folder.chmod(0o777)
        with held(Store(str(folder))):
            pass

        def taken() -> str:
            command = [sys.executable, "-c", TAKE_AS_ANOTHER_USER, str(folder)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

        assert taken() == "held"
        (folder / ".lock").chmod(0o600)
        assert taken().endswith(".lock belongs to another user and is not readable; set another name, or delete it")
    finally:
        shutil.rmtree(folder)


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
