"""Masks the texts of exceptions in place, so that `except` clauses still get the same exception with arguments of the same types."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import PurePath
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from undula.masking.values import mask

_MOST_DEPTH = 20
"""Maximum depth of containers within an argument that are looked through. One that contains itself has no end."""


def mask_error(error: BaseException | None) -> None:
    """Mask the texts of an exception, of those that it follows from and of those in its group, before it leaves this process.

    Attributes of objects that are not containers stay, because the script may go on to use such an object. So does the message of an
    ExceptionGroup, which is read-only.
    """
    seen: dict[int, BaseException] = {}
    following = [error]
    while following:
        error = following.pop()
        if error is None or id(error) in seen:
            continue
        seen[id(error)] = error
        following += [error.__cause__, error.__context__, *_exceptions_in([*error.args, *vars(error).values()])]
        if isinstance(error, BaseExceptionGroup):
            following += error.exceptions
        with suppress(Exception):  # a class may refuse other arguments, and attributes can be read-only
            error.args = _masked(error.args)
        for name in {*vars(error), *_slots(type(error))}:
            with suppress(Exception):
                value = getattr(error, name)
                if (shown := _masked(value)) is not value:
                    setattr(error, name, shown)


def _slots(kind: type[BaseException]) -> Iterator[str]:
    """Yield the names of the attributes of an exception that are not in its `__dict__`: its slots, and those of classes in C."""
    for each in kind.__mro__:
        for name, attribute in vars(each).items():
            if isinstance(attribute, GetSetDescriptorType | MemberDescriptorType) and not name.startswith("__"):
                yield name


def _exceptions_in(values: Iterable[Any]) -> Iterator[BaseException]:
    """Yield the exceptions among values, and in the lists and tuples among them."""
    for value in values:
        if isinstance(value, BaseException):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, BaseException))


def _masked(value: Any, depth: int = 0) -> Any:
    """Return the value itself if there is no secret in it, and otherwise a masked one of the same type, if possible."""
    if isinstance(value, str):
        return value if (shown := mask(value)) == value else shown
    if isinstance(value, bytes | bytearray):
        text = value.decode(errors="surrogateescape")
        return value if (shown := mask(text)) == text else type(value)(shown.encode(errors="surrogateescape"))
    if isinstance(value, PurePath):
        return value if (shown := mask(str(value))) == str(value) else type(value)(shown)
    if isinstance(value, dict | list | tuple | set | frozenset) and depth < _MOST_DEPTH:
        return _masked_container(value, depth)
    return value


def _masked_container(value: Any, depth: int) -> Any:
    items = [*value.items()] if isinstance(value, dict) else [*value]
    shown = [_masked(item, depth + 1) for item in items]
    if all(one is other for one, other in zip(items, shown, strict=True)):
        return value
    if isinstance(value, tuple):
        return tuple.__new__(type(value), shown)  # a subclass, such as a named tuple, may have arguments of its own
    if isinstance(value, frozenset):
        return frozenset(shown)
    masked = copy.copy(value)  # has what a subclass adds, such as the function of a defaultdict
    masked.clear()
    (masked.extend if isinstance(value, list) else masked.update)(shown)
    return masked
