"""Tests of secrets in exceptions, whose arguments keep their types."""

import pickle
import subprocess
import traceback
from collections import defaultdict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from undula.masking.exceptions import mask_error
from undula.masking.values import declare
from undula.train.tracebacks import keep_traceback

SECRET = "tops3cretvalue9"
Pair = namedtuple("Pair", "name value")


class WithAttribute(Exception):
    def __init__(self, info: object):
        super().__init__("odd")
        self.info = info

    def __str__(self) -> str:
        return f"odd {self.info}"


class WithSlot(Exception):
    __slots__ = ("text",)

    def __init__(self, text: object):
        self.text = text

    def __str__(self) -> str:
        return f"{self.text}"


def following_from(cause: BaseException | None, context: BaseException | None) -> Exception:
    error = ValueError("outer")
    error.__cause__, error.__context__ = cause, context
    return error


def noted() -> Exception:
    error = ValueError("outer")
    error.add_note(f"with {SECRET}")
    return error


ERRORS: dict[str, Callable[[], Exception]] = {
    "text": lambda: ValueError(f"x {SECRET}"),
    "tuple": lambda: ValueError(("a", SECRET)),
    "bytes": lambda: ValueError(b"\xff" + SECRET.encode()),
    "bytearray": lambda: ValueError(bytearray(SECRET.encode())),
    "set": lambda: ValueError({SECRET, 1}),
    "frozenset": lambda: ValueError(frozenset({SECRET})),
    "key": lambda: ValueError({SECRET: 1}),
    "nested": lambda: ValueError([{"a": (SECRET, {"b": [SECRET]})}]),
    "named tuple": lambda: ValueError(Pair("a", SECRET)),
    "default": lambda: ValueError(defaultdict(list, {"a": [SECRET]})),
    "path": lambda: FileNotFoundError(2, "no", Path("/a") / SECRET),
    "two files": lambda: OSError(2, "no", "/a", None, f"/{SECRET}"),
    "attribute": lambda: WithAttribute((SECRET,)),
    "slot": lambda: WithSlot(f"bad {SECRET}"),
    "group": lambda: ExceptionGroup("several", [ValueError(1), ExceptionGroup("more", [ValueError(f"inner {SECRET}")])]),
    "error in an error": lambda: ValueError("outer", [KeyError(SECRET)]),
    "cause": lambda: following_from(KeyError(SECRET), None),
    "context": lambda: following_from(KeyError("a"), KeyError(SECRET)),
    "note": noted,
    "output": lambda: subprocess.CalledProcessError(1, ("curl", SECRET), output=SECRET.encode(), stderr=SECRET.encode()),
    "decoding": lambda: UnicodeDecodeError("utf-8", SECRET.encode() + b"\xff", len(SECRET), len(SECRET) + 1, "bad"),
    "syntax": lambda: SyntaxError("bad", ("train.py", 1, 1, f"key = '{SECRET}'")),
    "import": lambda: ImportError(f"no {SECRET}", name=SECRET, path=SECRET),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_no_part_of_an_exception_shows_a_secret(name: str) -> None:
    declare({"PHRASE": SECRET})
    error = ERRORS[name]()
    keep_traceback(error)
    shown = "".join(traceback.format_exception(error)) + repr(error.__context__)
    assert (
        SECRET
        not in f"{error} {error!r} {shown} {vars(error)} {pickle.dumps(error.args)!r} {pickle.dumps(vars(error))!r}"
    )
    assert "***" in f"{error!r} {shown} {vars(error)} {getattr(error, 'object', '')!r}"


def test_the_arguments_of_an_exception_keep_their_types() -> None:
    declare({"PHRASE": SECRET})
    arguments = [
        "a",
        (1, SECRET),
        b"x" + SECRET.encode(),
        {SECRET},
        Path(SECRET),
        Pair("a", SECRET),
        {"a": [SECRET]},
        7,
    ]
    error = ValueError(*arguments)
    mask_error(error)
    assert error.args == ("a", (1, "***"), b"x***", {"***"}, Path("***"), Pair("a", "***"), {"a": ["***"]}, 7)
    assert [type(part) for part in error.args] == [type(part) for part in arguments]
    assert arguments[6] == {"a": [SECRET]}


def test_what_has_no_secret_stays_the_same_object() -> None:
    declare({"PHRASE": SECRET})

    @dataclass
    class Request:
        url: str

    parts: list[object] = [["a"], {"b": ("c",)}, Request("d"), b"e", Path("f")]
    parts.append(parts)
    error = WithAttribute(parts)
    error.args = tuple(parts)
    mask_error(error)
    assert all(one is other for one, other in zip(error.args, parts, strict=True))
    assert error.info is parts


def test_an_exception_that_refuses_changes_does_not_stop_the_mask() -> None:
    declare({"PHRASE": SECRET})

    class Closed(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise TypeError(name)

    error = following_from(Closed(SECRET), KeyError(SECRET))
    mask_error(error)
    assert str(error.__context__) == "'***'"
    assert list(chain_of(error)) == [ValueError, Closed]


def chain_of(error: BaseException | None) -> Iterator[type[BaseException]]:
    while error is not None:
        yield type(error)
        error = error.__cause__
