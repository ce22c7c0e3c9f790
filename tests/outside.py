"""Packages of other people that add to the library, as pip would install them."""

import os
from collections.abc import Mapping
from pathlib import Path


def installed(folder: Path, name: str, source: str, group: str, **entries: str) -> dict[str, str]:
    """Install a package of one module, and return the environment of a process that can import it.

    Args:
        folder: Folder for the package.
        name: Name of the package and of its module.
        source: Source of the module.
        group: Group of its entry points.
        entries: Entry points by name.
    """
    return installed_files(folder, name, {f"{name}.py": source}, {group: entries})


def installed_files(
    folder: Path, name: str, files: Mapping[str, str], groups: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Install a package, and return the environment of a process that can import it.

    Args:
        folder: Folder for the package.
        name: Name of the package.
        files: Sources by path.
        groups: Entry points by name, by group.
    """
    metadata = folder / f"{name}-1.0.dist-info"
    points = [line for group, of in groups.items() for line in (f"[{group}]", *(f"{key} = {of[key]}" for key in of))]
    written = {
        **{folder / path: source for path, source in files.items()},
        metadata / "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        metadata / "entry_points.txt": "\n".join(points),
    }
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
