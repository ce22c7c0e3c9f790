"""State of the script itself that belongs to the state of the run, such as running means or the results of its own validations."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from undula.errors import UsageError
from undula.state.values import Json, decode, encode

_ENTRY = "script"
"""Name of this state in the state of a run."""
Capture = Callable[[], Any]
Restore = Callable[[Any, bool], None]
AfterStep = Callable[[int, Mapping[str, float] | None], None]
"""Function that is called with the number of committed steps, and with the means of the validation after them if there was one."""


class ScriptState:
    """Values that the script has registered, as they were when a step was committed or when the script asked for the next step.

    In between, while the script still works on what follows from the step, its values are not looked at: this work is either done or not.
    The work also includes the validation after the step, because layers may change weights on the way to eval mode and back.
    """

    def __init__(self) -> None:
        self._parts: dict[str, tuple[Capture, Restore]] = {}
        self._values: dict[str, Json] = {}
        self._owed_since: int | None = None

    def add(self, name: str, capture: Capture, restore: Restore) -> None:
        """Register a part of the state.

        Raises:
            UsageError: The name is taken.
        """
        if name in self._parts:
            raise UsageError(f"run.state() was called twice for {name!r}; give each part of the state its own name")
        self._parts[name] = capture, restore

    @property
    def is_used(self) -> bool:
        """Whether the script has registered values, so that it can repeat work that was not finished."""
        return bool(self._parts)

    @property
    def functions(self) -> list[object]:
        """Functions that the script has registered."""
        return [function for part in self._parts.values() for function in part]

    @property
    def owed_since(self) -> int | None:
        """Number of committed steps before those whose validation or work of the script is still to be done; None if all is done."""
        return self._owed_since

    def capture(self, owed_since: int | None) -> None:
        """Take the values as they are now.

        Args:
            owed_since: Number of committed steps before those whose validation or work of the script is still to be done; None if all is
                done.

        Raises:
            UsageError: A checkpoint cannot hold a value.
        """
        self._values = {name: _encoded(name, take()) for name, (take, _) in self._parts.items()}
        self._owed_since = owed_since

    def values(self) -> dict[str, Any]:
        """Return the values as JSON, under their name in the state of the run; nothing if there is nothing to say."""
        if not self._values and self._owed_since is None:
            return {}
        return {_ENTRY: {"owed_since": self._owed_since, "values": self._values}}

    def changes(self, values: Mapping[str, Any]) -> list[str]:
        """Return descriptions of what a state has of the script that is not registered now, and the other way round."""
        saved = values.get(_ENTRY, {}).get("values", {})
        lost = [
            f"run.state({name!r}) is not called any more, and its value is dropped"
            for name in saved.keys() - self._parts.keys()
        ]
        new = [
            f"run.state({name!r}) was not called before, and its value begins anew"
            for name in self._parts.keys() - saved.keys()
        ]
        return [*sorted(lost), *sorted(new)]

    def restore(self, values: Mapping[str, Any]) -> None:
        """Give the values of a restored state back to the script."""
        entry = values.get(_ENTRY, {})
        self._values = {name: value for name, value in entry.get("values", {}).items() if name in self._parts}
        self._owed_since = entry.get("owed_since")
        for name, value in self._values.items():
            self._parts[name][1](decode(value, {}), self._owed_since is not None)


def is_settled(values: Mapping[str, Any]) -> bool:
    """Return whether the validation and the work of the script were done in a state with these values."""
    return values.get(_ENTRY, {}).get("owed_since") is None


def _encoded(name: str, value: object) -> Json:
    tensors: dict[str, Tensor] = {}
    encoded = encode(f"run.state({name!r})", value, tensors)
    if tensors:
        raise UsageError(
            f"{next(iter(tensors))} is a tensor; keep it as a number or a list, or as a buffer of the model"
        )
    return encoded
