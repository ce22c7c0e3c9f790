"""Tests of the files beside a script that are not sent to a cluster: which they are, and what an error about one of them says."""

import os
import sys
from pathlib import Path

import pytest

from undula.elastic.ray.ignored_files import SENDS_ALL, ignored_by_git
from undula.train.left_out import left_out, note_left_out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        ".gitignore": "/data/\n.env\n*.log\n/made\nlocal.py\n.cache/\n",
        ".rayignore": "notes\n",
        ".env": "",
        "big/a.bin": "",
        "configs/.gitignore": "mine.yaml\n",
        "configs/base.yaml": "",
        "configs/mine.yaml": "",
        "data/deep/a.csv": "",
        "data/b.csv": "",
        "local.py": "",
        "logs/a.log": "",
        "made": "",
        "notes/a.log": "",
        ".cache/CACHEDIR.TAG": "",
        "__pycache__/a.log": "",
        "train.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_shortest_paths_that_only_git_was_told_to_ignore_are_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SENDS_ALL, raising=False)
    assert ignored_by_git(folder, []) == [".env", "configs/mine.yaml", "data", "local.py", "logs", "made"]
    assert ignored_by_git(folder, ["data", "*.log"]) == [".env", "configs/mine.yaml", "local.py", "made"]
    monkeypatch.setenv(SENDS_ALL, "1")
    assert ignored_by_git(folder, []) == []


def notes_of(error: BaseException) -> list[str]:
    note_left_out(error)
    return getattr(error, "__notes__", [])


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy of a script's folder on another machine, which this process executes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    for name, value in left_out(Path("/home/me/job"), ["configs/mine.yaml", "data", "local.py", "made"]).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_an_error_about_what_was_not_sent_says_so(there: Path) -> None:
    def opened(file: str | Path) -> BaseException:
        with pytest.raises(FileNotFoundError) as error:
            Path(file).read_text()
        return error.value

    for file in ("data/a.csv", there / "data" / "a.csv", "/home/me/job/data/a.csv", "./data"):
        (note,) = notes_of(opened(file))
        assert note.startswith(".gitignore names data, so it was not sent to the cluster; see ")
    assert notes_of(ModuleNotFoundError("no local", name="local"))[0].startswith(".gitignore names local.py")
    assert notes_of(ModuleNotFoundError("no made.x", name="made.x"))[0].startswith(".gitignore names made,")
    for file in ("database/a.csv", "configs/none.yaml", "/data/a.csv"):
        assert notes_of(opened(file)) == []
    assert notes_of(ModuleNotFoundError("no einops", name="einops")) == []
    assert notes_of(FileNotFoundError("no class folder in data")) == []


def test_an_error_in_the_folder_of_the_user_says_nothing_of_a_cluster(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in left_out(there, ["data"]).items():
        monkeypatch.setenv(name, value)
    assert notes_of(FileNotFoundError(2, os.strerror(2), "data/a.csv")) == []
