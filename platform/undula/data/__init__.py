"""Data of a job: stored data sets, datasets of the script, and the preparation of data sets."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undula.data.stored.manifest import Manifest, load_manifest
    from undula.data.stored.stream import Stream, stream

__all__ = ["Manifest", "Stream", "load_manifest", "stream"]

_HOMES = {
    "Manifest": "undula.data.stored.manifest",
    "Stream": "undula.data.stored.stream",
    "load_manifest": "undula.data.stored.manifest",
    "stream": "undula.data.stored.stream",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, as the package `undula` does."""
    if name not in __all__:
        raise AttributeError(f"module 'undula.data' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
