"""Tests of the search for the packages of a project that a script imports from above its folder."""

from pathlib import Path

import pytest

from undula.driver.project import project_modules


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "pyproject.toml": "",
        "mylib/__init__.py": "from mylib import models",
        "mylib/models.py": "import shared.layers",
        "shared/layers.py": "import json",
        "tool.py": "",
        "src/inner/__init__.py": "",
        "torch/data.py": "",
        "unused/__init__.py": "",
        "jobs/beside.py": "import tool",
        "jobs/train.py": "import mylib, torch, beside, os, missing\nfrom inner.x import y\nfrom . import z",
        "jobs/local/__init__.py": "",
        "local/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_packages_of_the_project_are_found_with_what_they_import(project: Path) -> None:
    names = ["mylib", "shared", "src/inner", "tool.py"]
    assert project_modules(project / "jobs" / "train.py") == [project / name for name in names]


def test_what_lies_beside_the_script_or_is_installed_is_not_taken_from_the_root(project: Path) -> None:
    (project / "jobs" / "train.py").write_text("import local, torch")
    (project / "jobs" / "beside.py").unlink()
    assert project_modules(project / "jobs" / "train.py") == []


def test_a_script_in_the_root_or_without_a_project_needs_nothing(project: Path) -> None:
    (project / "main.py").write_text("import mylib")
    assert project_modules(project / "main.py") == []
    (project / "pyproject.toml").unlink()
    assert project_modules(project / "jobs" / "train.py") == []
