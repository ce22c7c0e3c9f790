"""Packages of a script's project that lie beside its folder, such as `mylib/` beside `jobs/train.py`, which a job needs as well."""

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
"""Names of which one lies in the root of a project."""


def project_modules(script: Path) -> list[Path]:
    """Return the packages and modules of a script's project that the script imports and that do not lie in its folder.

    They are found in the root of the project, which is the nearest folder above the script that has one of `ROOT_MARKS`, and in its folder
    `src`. Imports of what is installed elsewhere, and of what lies beside the script, are not among them.
    """
    folder = script.parent
    root = next((place for place in folder.parents if any((place / mark).exists() for mark in ROOT_MARKS)), None)
    if root is None or any((folder / mark).exists() for mark in ROOT_MARKS):
        return []
    modules: dict[str, Path | None] = {}
    unread = [script]
    while unread:
        for name in set(_imports(unread.pop())) - modules.keys() - sys.stdlib_module_names:
            modules[name] = found = _module(folder, name) or _in_project(name, root)
            if found:
                unread += found.rglob("*.py") if found.is_dir() else [found]
    return sorted(found for found in modules.values() if found and found.parent != folder)


def _in_project(name: str, root: Path) -> Path | None:
    """Return the path of a package or module of the project; None if Python would find another one, or none."""
    found = _module(root, name) or _module(root / "src", name)
    return found if found and not _is_installed(name, found) else None


def _module(folder: Path, name: str) -> Path | None:
    package, module = folder / name, folder / f"{name}.py"
    if module.is_file():
        return module
    return package if package.is_dir() and any(package.rglob("*.py")) else None


def _is_installed(name: str, found: Path) -> bool:
    """Return whether Python finds another module of this name, for example because it is installed."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return False
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    return bool(places) and not any(place and Path(place).is_relative_to(found) for place in places)


def _imports(file: Path) -> Iterator[str]:
    """Yield the names of the top-level packages that a file imports. A file that is no Python has none."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]
