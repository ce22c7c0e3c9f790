"""What other packages add to the library, by the entry points of their metadata.

The library's own parts come from tables in the same form, and not from its metadata, because it travels to clusters without that.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from undula.errors import SpecError, one_line


def names(group: str, own: Mapping[str, str]) -> list[str]:
    """Return the names of everything of a kind: first the library's own, and then what other packages add.

    Args:
        group: Kind, such as `undula.commands`, as packages name it in their metadata.
        own: The library's own, as `module:attribute` by name. No other package can replace it.
    """
    return list(dict.fromkeys([*own, *sorted(entry_points(group=group).names)]))


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
        return EntryPoint(name, own[name], group).load()
    for entry in entry_points(group=group, name=name):
        package = entry.dist.name if entry.dist else "another package"
        try:
            return entry.load()
        except Exception as error:
            raise SpecError(
                f"{name!r}, which {package} adds to {group}, cannot be imported: {one_line(error)}; "
                f"install what it needs, or uninstall {package}"
            ) from error
    return None
