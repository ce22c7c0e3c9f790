"""Packages of a script's project that lie beside its folder, such as `mylib/` beside `jobs/train.py`, which a job needs as well."""

import ast
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from undula.errors import SpecError

ROOT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
"""Names of which one lies in the root of a project."""


def project_modules(script: Path, root: Path | None = None) -> list[Path]:
    """Return the packages and modules of a script's project that the script imports and that do not lie in its folder.

    They are found in the root of the project and in its folder `src`. Imports of what is installed elsewhere, and of what lies beside the
    script, are not among them.

    Args:
        script: Absolute path of the script.
        root: Root of the project; by default the nearest folder of or above the script that has one of `ROOT_MARKS`.

    Raises:
        SpecError: The root is no folder.
    """
    if root is not None and not root.is_dir():
        raise SpecError(
            f"command line: --project {root} is no folder; give the one in which the packages of the script lie"
        )
    folder = script.parent
    marked = (place for place in script.parents if any((place / mark).exists() for mark in ROOT_MARKS))
    root = root.absolute() if root else next(marked, folder)
    if root == folder and not (root / "src").is_dir():
        return []
    modules: dict[str, Path | None] = {}
    unread = [script]
    while unread:
        for name in set(_imports(unread.pop())) - modules.keys() - sys.stdlib_module_names:
            modules[name] = found = _module(folder, name) or _in_project(name, root)
            if found:
                unread += found.rglob("*.py") if found.is_dir() else [found]
    return sorted(found for found in modules.values() if found and found.parent != folder)


@contextmanager
def importable(modules: Sequence[Path], env: Mapping[str, str] = MappingProxyType({})) -> Iterator[dict[str, str]]:
    """Yield the environment variable with which Python finds packages and modules, but nothing that lies beside them.

    Args:
        modules: Their paths.
        env: Variables of the process beside those of this one.
    """
    if not modules:
        yield {}
        return
    with TemporaryDirectory(prefix="undula-modules-") as folder:
        for module in modules:
            Path(folder, module.name).symlink_to(module)
        yield {"PYTHONPATH": os.pathsep.join([folder, *filter(None, [{**os.environ, **env}.get("PYTHONPATH")])])}


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
