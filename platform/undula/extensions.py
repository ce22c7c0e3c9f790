"""What other packages add to the library, by the entry points of their metadata.

The library's own parts come from tables in the same form, and not from its metadata, because it travels to clusters without that.
"""

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec
from typing import Any

from undula.errors import SpecError, one_line


def names(group: str, own: Mapping[str, str]) -> list[str]:
    """Return the names of everything of a kind: first the library's own, as far as it is installed, and then what other packages add.

    Args:
        group: Kind, such as `undula.commands`, as packages name it in their metadata.
        own: The library's own, as `module:attribute` by name. No other package can replace it.
    """
    installed = [name for name, value in own.items() if _is_installed(value.partition(":")[0])]
    return list(dict.fromkeys([*installed, *sorted(_entry_points(tuple(sys.path), group).names)]))


def load(group: str, own: Mapping[str, str], name: str) -> Any:
    """Return what has a name, of everything of a kind; None if there is nothing of that name.

    Args:
        group: Kind, such as `undula.commands`.
        own: The library's own, as `module:attribute` by name.
        name: The name.

    Raises:
        SpecError: It cannot be imported.
    """
    if name in own:
        try:
            return EntryPoint(name, own[name], group).load()
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("undula."):
                raise
            raise SpecError(
                f"{name!r} needs {error.name}, which this installation of Undula was made without; install all of it"
            ) from error
    for entry in _entry_points(tuple(sys.path), group).select(name=name):
        package = entry.dist.name if entry.dist else "another package"
        try:
            return entry.load()
        except Exception as error:
            raise SpecError(
                f"{name!r}, which {package} adds to {group}, cannot be imported: {one_line(error)}; "
                f"install what it needs, or uninstall {package}"
            ) from error
    return None


@lru_cache
def _entry_points(path: tuple[str, ...], group: str) -> EntryPoints:
    """Return the entry points of all packages on a path. To read their metadata takes a hundredth of a second."""
    return entry_points(group=group)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor is the package that it lies in
        return False
    except SpecError:  # that package refuses a version of a library, and does so again when it is used
        return True
