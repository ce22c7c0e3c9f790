"""The tree is the architecture: dependencies point one way, and what the README names is there."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "platform" / "undula"

BELOW = {
    "errors": set(),
    "storage": {"errors"},
    "plan": {"errors"},
    "data": {"errors", "storage", "plan"},
    "state": {"errors", "storage", "plan"},
    "run": {"errors", "storage", "plan", "data", "state"},
    "elastic": {"errors", "storage", "plan", "data", "state", "run"},
    "cluster": {"errors", "storage", "plan", "data", "state", "run", "elastic"},
    "study": {"errors", "storage", "plan", "data", "state", "run", "elastic", "cluster", "report"},
    "report": {"errors", "storage", "plan", "data", "state", "run", "elastic"},
    "testing": {"errors", "storage", "plan", "data", "state", "run", "elastic", "cluster"},
}
"""Packages and modules from the ground up, and what each may import. What stands on top (yaml_file, spec, preflight, live, entrypoint, cli,
chaos_command, reference) may import all."""
HEAVY = {  # library -> where it may be imported
    "ray": {"data", "run", "elastic", "cluster", "study", "testing", "driver", "entrypoint", "live"},
    "torch": {"data", "state", "run", "elastic", "study", "testing", "preflight"},
    "boto3": {"storage", "cluster"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def owner(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = owner(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "undula" and len(parts) > 1 and own in BELOW:
            assert parts[1] in BELOW[own] | {own}, f"{own} imports {name}"
        if parts[0] in HEAVY:
            assert own in HEAVY[parts[0]], f"{own} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_api_of_ray_is_touched_in_elastic_alone(path: Path) -> None:
    private = {name for name in imports(path) if name.startswith("ray.") and "_internal" in name.split(".")}
    assert owner(path) == "elastic" or not private


def test_no_file_hides_the_standard_library() -> None:
    assert [path.name for path in (ROOT / "platform").iterdir() if path.name != "undula"] in ([], ["undula.egg-info"])
    assert not list(PACKAGE.rglob("platform.py"))
    for folder in (ROOT, ROOT / "platform"):
        command = [sys.executable, "-c", "import platform; print(platform.python_version())"]
        assert subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_public_names_are_sorted() -> None:
    import undula

    assert undula.__all__ == sorted(undula.__all__)
    assert all(getattr(undula, name) for name in undula.__all__)


def test_every_path_that_the_readme_names_exists() -> None:
    named = re.findall(
        r"`((?:platform|jobs|docs|tests)/[\w./-]+)`|\]\(((?!http)[\w./-]+)\)", (ROOT / "README.md").read_text()
    )
    paths = {path for pair in named for path in pair if path}
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_files_and_functions_fit_a_sitting() -> None:
    too_long = []
    for path in modules():
        text = path.read_text()
        if text.count("\n") > 420:
            too_long.append(path.name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno > 70:
                too_long.append(f"{path.name}:{node.name}")
    assert not too_long


def test_the_command_line_starts_without_ray_and_torch() -> None:
    """They take seconds, and Ray reads a cluster's token when it is imported, which `undula run` makes later."""
    check = "import sys, undula.cli.main; sys.exit(', '.join({'ray', 'torch', 'boto3'} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_driver_starts_without_what_only_workers_need() -> None:
    """Tensors of parts, checkpoints and TensorBoard's writer take a second to import; workers do it while they are prepared."""
    late = {"torch.distributed.tensor", "torch.distributed.checkpoint", "sympy", "tensorboardX", "boto3"}
    names = "undula.main, undula.Run, undula.OptimizerConfig"
    check = f"import sys, undula; {names}; sys.exit(', '.join({late} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
