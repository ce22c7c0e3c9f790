"""Packages of a script's project that lie beside its folder, such as `mylib/` beside `jobs/train.py`, which a job needs as well."""

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from undula.errors import SpecError

_NAME = re.compile(r"undula\b", re.IGNORECASE)
"""Beginning of the requirement of a distribution that requires this package."""
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
    marked = filter(_is_root, script.parents)
    root = root.absolute() if root else next(marked, folder)
    if root == folder and not (root / "src").is_dir():
        return []
    modules, _ = _imported(script, root)
    return sorted(found for found in modules.values() if found and found.parent != folder)


def refuse_without_entry(script: Path) -> None:
    """Refuse a script that can start no run, before it trains without one.

    It can start none if neither it, nor a module of its folder or its project that it imports, names `undula`, and what else it imports
    is installed and does not require `undula`.

    Raises:
        SpecError: The script can start none.
    """
    modules, files = _imported(script, next(filter(_is_root, script.parents), script.parent))
    if any(b"undula" in file.read_bytes() for file in files if file.is_file()):
        return
    distributions = packages_distributions()
    for name in (name for name, found in modules.items() if found is None):
        owners = distributions.get(name)
        if not owners or any(_NAME.match(each) for owner in owners for each in requires(owner) or ()):
            return
    raise SpecError(
        f"{script.name} does not use undula, so that it would train without a run; end it with undula.main(train), or with launch(main) of "
        "undula.adapters.transformers, undula.adapters.accelerate or undula.adapters.lightning (docs/migrate.md)"
    )


def _imported(script: Path, root: Path) -> tuple[dict[str, Path | None], list[Path]]:
    """Return what a script and its own modules import, by name, without the standard library; None for what is not their own.

    Returns:
        Modules and packages, and all files that were read.
    """
    modules: dict[str, Path | None] = {}
    files = [script]
    for file in files:  # which grows on the way
        for name in set(_imports(file)) - modules.keys() - sys.stdlib_module_names:
            modules[name] = found = _module(script.parent, name) or _in_project(name, root)
            if found:
                files += found.rglob("*.py") if found.is_dir() else [found]
    return modules, files


def _is_root(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in ROOT_MARKS)


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
    except (SyntaxError, ValueError, OSError, SystemError):
        return  # a SystemError comes from Python 3.11 if another thread parses at the same time
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]
