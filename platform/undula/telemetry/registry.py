"""Registry of the trackers that a job can ask for, each by its key below `trackers`.

Beside those of the library, these are the trackers of other packages, each of which adds an `Entry` by an entry point in the group
`undula.trackers`.
"""

from collections.abc import Mapping
from dataclasses import make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from undula import extensions
from undula.errors import STRICT
from undula.telemetry.tracker import Entry, LibraryTracker

if TYPE_CHECKING:
    from undula.storage import Store

GROUP = "undula.trackers"
OWN = {name: f"undula.telemetry.trackers.{name}:ENTRY" for name in ("mlflow", "tensorboard", "wandb")}
ENTRIES: Mapping[str, Entry] = {name: extensions.load(GROUP, OWN, name) for name in extensions.names(GROUP, OWN)}
"""Entries by key."""
SETTINGS = {key: entry.settings for key, entry in ENTRIES.items() if entry.settings is not None}
"""Dataclasses of settings by key. A job asks for these trackers."""
_Settings: Any = make_dataclass(
    "_Settings",
    [(key, Annotated[owner | None, Field(description=owner.__doc__)], None) for key, owner in SETTINGS.items()],
    frozen=True,
)


@checked_dataclass(frozen=True, config=STRICT)
class TrackersSpec(_Settings):  # type: ignore[misc]
    """Experiment trackers that show the run beside TensorBoard, each by its key. Some need an extra of the package."""

    def __bool__(self) -> bool:
        return any(getattr(self, key) is not None for key in SETTINGS)


def configured_trackers(spec: TrackersSpec, store: "Store") -> dict[str, LibraryTracker]:
    """Return the trackers that a job asks for, by key. They are not checked."""
    given = {key: getattr(spec, key) for key in SETTINGS}
    return {key: ENTRIES[key].make(settings, store) for key, settings in given.items() if settings is not None}


def standing_trackers(store: "Store") -> tuple[LibraryTracker, ...]:
    """Return the trackers that show all runs."""
    return tuple(entry.make(None, store) for entry in ENTRIES.values() if entry.settings is None)
