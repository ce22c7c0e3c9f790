"""Names that a library numbers by a count of its process, as Keras does: the first layer is `dense`, the next one `dense_1`. A script that
makes its model once more in the same process has the same model under other names."""

import re
from collections.abc import Mapping

_COUNT = re.compile(r"_(\d+)(?=[/.]|$)")
"""Count at the end of a part of a name, as in `model.sequential_1/dense_3/kernel`."""
_END = re.compile(r"(?:_(\d+))?(?:[/.]|$)")
_Shape = tuple[int, ...]
_first: dict[tuple[tuple[str, _Shape], ...], list[str]] = {}
"""Names of the first model of each kind that this process has made for a run, by their forms without counts and by shapes."""


def first_names(shapes: Mapping[str, _Shape]) -> Mapping[str, str]:
    """Return the names with which this process made a model first, by those that it has now; empty unless counts in them have grown.

    Args:
        shapes: Shapes of the model's tensors, by name, in the order of the model.
    """
    names = list(shapes)
    first = _first.setdefault(tuple((without_counts(name), shapes[name]) for name in names), names)
    grown = all(
        count >= before
        for name, former in zip(names, first, strict=True)
        for count, before in zip(_counts(name), _counts(former), strict=True)
    )
    return dict(zip(names, first, strict=True)) if grown and names != first else {}


def without_counts(name: str) -> str:
    """Return a name without the counts in it."""
    return _COUNT.sub("", name)


def _counts(name: str) -> list[int]:
    """Return the count of each part of a name; 0 for a part without one."""
    return [int(found[1] or 0) for found in _END.finditer(name)]
