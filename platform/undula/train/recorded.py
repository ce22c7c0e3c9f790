"""Numbers that a script records. A float rounds some integers of 2^53 or more, such as ids; their records keep them or are refused."""

from typing import Any

from undula.errors import UsageError


def recorded(value: Any) -> float:
    """Return a number of Python, NumPy or torch as a float, or as an integer if a float would round it."""
    number = value.item() if hasattr(value, "item") else value
    rounded = float(number)
    return number if isinstance(number, int) and number != rounded else rounded


def averaged(call: str, name: str, value: Any) -> float:
    """Return a number of which a mean is recorded, as a float.

    Raises:
        UsageError: A float would round it.
    """
    number = recorded(value)
    if isinstance(number, int):
        raise UsageError(
            f"{call} got {name!r} as {number}, which a mean would round to {float(number):.0f}; record it by run.log() between two steps, "
            "which keeps integers, or as text"
        )
    return number
