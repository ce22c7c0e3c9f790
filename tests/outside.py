"""Packages of other people that add to the library, as pip would install them."""

import os
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
    (folder / f"{name}.py").write_text(source)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = [f"{key} = {value}" for key, value in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *points]))
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
