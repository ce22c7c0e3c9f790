"""Parameters whose tests run at night only, because other parameters prove the same."""

from collections.abc import Iterable
from typing import Any

import pytest


def at_night(values: Iterable[Any]) -> list[Any]:
    """Return parameters, each a value or a tuple of values, that belong to `make nightly`."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.nightly) for each in values]
