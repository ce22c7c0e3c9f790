"""Tests of the working directory of a worker that does not see the driver's: which files reach the run, and which copies stay."""

import os
from pathlib import Path

import pytest

from undula.storage import Store
from undula.train import work_folder
from undula.train.work_folder import Origin, WorkFolder, own_folder, versions


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Folder for temporary files of the test alone."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(work_folder, "_held", [])
    return tmp_path / "tmp"


def submitted(tmp_path: Path) -> Path:
    folder = tmp_path / "submitted"
    (folder / "inputs").mkdir(parents=True)
    (folder / "inputs" / "x.txt").write_text("x")
    return folder


def release() -> None:
    while work_folder._held:
        os.close(work_folder._held.pop())


def test_only_what_the_script_has_written_or_changed_is_brought(tmp_path: Path) -> None:
    source, store = submitted(tmp_path), Store(str(tmp_path / "run"))
    here = WorkFolder(own_folder("a", source), versions(source))
    (here.path / "inputs" / "x.txt").write_text("changed")
    (here.path / "outputs").mkdir()
    (here.path / "outputs" / "model.pt").write_bytes(b"weights")
    here.bring(store)
    files = {entry.name for entry in (store / "files").list()}
    assert files == {"inputs/x.txt", "outputs/model.pt"}
    assert (source / "inputs" / "x.txt").read_text() == "x"


def test_another_process_that_becomes_rank_0_continues_with_what_was_brought(tmp_path: Path) -> None:
    source, store = submitted(tmp_path), Store(str(tmp_path / "run"))
    first = WorkFolder(own_folder("a", source), versions(source))
    first.begin(store, is_first=True)
    (first.path / "log.txt").write_text("1\n")
    first.bring_along(store)
    first.bring(store)
    (first.path / "log.txt").write_text("1\n2\n")
    first.begin(store, is_first=True)
    assert (first.path / "log.txt").read_text() == "1\n2\n"  # it has the newest files itself
    other = WorkFolder(own_folder("b", source), versions(source))
    other.begin(store, is_first=False)
    assert not (other.path / "log.txt").exists()
    other.begin(store, is_first=True)
    assert (other.path / "log.txt").read_text() == "1\n"


def test_a_folder_with_links_reads_what_the_node_has_and_brings_what_is_new(tmp_path: Path) -> None:
    source, store = submitted(tmp_path), Store(str(tmp_path / "run"))
    here = WorkFolder(own_folder("a", source, links=True), {})
    assert (here.path / "inputs" / "x.txt").read_text() == "x"
    (here.path / "model.pt").write_bytes(b"weights")
    here.bring(store)
    assert [entry.name for entry in (store / "files").list()] == ["model.pt"]


def test_copies_stay_as_long_as_a_process_uses_them(tmp_path: Path, temporary: Path) -> None:
    source = submitted(tmp_path)
    first = own_folder("a", source)
    second = own_folder("b", source)
    assert first.exists()
    release()
    third = own_folder("c", source)
    assert [first.exists(), second.exists(), third.exists()] == [False, False, True]
    assert {path.name for path in temporary.iterdir()} == {third.name, f"{third.name}.lock"}
    release()


def test_a_process_sees_the_drivers_folder_only_on_its_machine_or_file_system(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("")
    here = Origin.of_this_process(script)
    assert here.is_here()
    elsewhere = Origin(here.folder, "another machine", here.script, here.identity)
    assert elsewhere.is_here()  # the same file, as on a file system that both mount
    copied = Origin(here.folder, "another machine", here.script, (here.identity[0], here.identity[1] + 1))
    assert not copied.is_here()
    assert not Origin("/tmp/session/working_dir_files/pkg", here.machine, here.script, here.identity).is_here()
