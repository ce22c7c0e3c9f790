"""Tests of the search for the packages of a project that a script imports from above its folder."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from undula.driver.project import project_modules, refuse_without_entry
from undula.errors import SpecError


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


def test_a_script_in_the_root_needs_what_lies_in_src_and_one_without_a_project_nothing(project: Path) -> None:
    (project / "main.py").write_text("import mylib, inner")
    assert project_modules(project / "main.py") == [project / "src" / "inner"]
    (project / "pyproject.toml").unlink()
    assert project_modules(project / "jobs" / "train.py") == []


def test_the_root_can_be_any_folder(project: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "missing").mkdir(parents=True)
    (tmp_path / "elsewhere" / "missing" / "__init__.py").write_text("")
    assert project_modules(project / "jobs" / "train.py", tmp_path / "elsewhere") == [
        tmp_path / "elsewhere" / "missing"
    ]
    with pytest.raises(SpecError, match=r"^command line: --project .*none is no folder; give the one in which"):
        project_modules(project / "jobs" / "train.py", tmp_path / "none")


@pytest.mark.parametrize("option", ["--print", "--in-process"])
def test_a_script_finds_the_packages_of_its_project_also_without_a_cluster(option: str, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "lib" / "ours").mkdir(parents=True)
    (tmp_path / "lib" / "ours" / "__init__.py").write_text("COUNT = 5\n")
    (tmp_path / "jobs" / "job.yaml").write_text(
        f"name: job\nruns: {tmp_path}/runs\nplan: {{global_batch: 4, virtual_workers: 1, max_steps: 1}}\n"
    )
    (tmp_path / "jobs" / "job.py").write_text(
        "import ours, torch, undula\n"
        "def train(run):\n"
        "    run.dataset(torch.utils.data.TensorDataset(torch.ones(8, 1)))\n"
        "    model = run.model(torch.nn.Linear(1, 1))\n"
        "    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))\n"
        "    for step in run.steps():\n"
        "        for (x,) in step.batches():\n"
        "            step.backward(model(x).square().mean())\n"
        "        step.update()\n"
        "print('COUNT', ours.COUNT)\n"
        "undula.main(train)\n"
    )
    undula = str(Path(sys.executable).parent / "undula")
    command = [undula, "run", str(tmp_path / "jobs" / "job.yaml"), "--project", str(tmp_path / "lib"), option]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "COUNT 5\n" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("imports", "is_refused"),
    [
        ("import torch, argparse, beside", True),
        ("import torch, nowhere", False),
        ("import mylib", False),
        ("import undula", False),
        ("import importlib\nimportlib.import_module('undula')", False),
    ],
)
def test_a_script_that_cannot_start_a_run_is_refused(project: Path, imports: str, is_refused: bool) -> None:
    """A module that is not installed here may be on the cluster, and may use undula."""
    (project / "mylib" / "models.py").write_text("import undula")
    (project / "jobs" / "train.py").write_text(imports)
    sentence = r"^train\.py does not use undula, so that it would train without a run; end it with undula\.main"
    with pytest.raises(SpecError, match=sentence) if is_refused else nullcontext():
        refuse_without_entry(project / "jobs" / "train.py")
