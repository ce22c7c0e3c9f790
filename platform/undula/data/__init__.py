"""Data sets of sharded Parquet: the manifest, the reader, streams that start at any position, and writers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undula.data.loader import Stream, stream
    from undula.data.manifest import Manifest, load_manifest

__all__ = ["Manifest", "Stream", "load_manifest", "stream"]

_HOMES = {
    "Manifest": "undula.data.manifest",
    "Stream": "undula.data.loader",
    "load_manifest": "undula.data.manifest",
    "stream": "undula.data.loader",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, as the package `undula` does."""
    if name not in __all__:
        raise AttributeError(f"module 'undula.data' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
