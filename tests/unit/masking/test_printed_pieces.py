"""Properties of what a process prints in pieces: no declared secret is shown, and the rest is shown unchanged and in order."""

import io
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undula.masking import output, values
from undula.masking.output import MaskedStream
from undula.masking.values import declare

SECRETS = st.text("ab1", min_size=6, max_size=12).filter(lambda text: len(set(text)) == 3)
"""Secrets of few characters, so that most begin as they, or others, end."""


@st.composite
def printed(draw: st.DrawFn) -> tuple[list[str], str]:
    """Draw secrets, and a text with them, with beginnings of them, and with other characters and lines."""
    secrets = draw(st.lists(SECRETS, min_size=1, max_size=3))
    beginnings = st.builds(lambda secret, end: secret[:end], st.sampled_from(secrets), st.integers(1, 12))
    parts = st.sampled_from(secrets) | beginnings | st.text("ab1 .,é\n\r", max_size=4)
    return secrets, "".join(draw(st.lists(parts, max_size=8)))


def shown(text: str, secrets: Sequence[str]) -> str:
    """Return a text with *** in place of secrets, by a search at each of its characters."""
    places = [(at, at + len(each)) for at in range(len(text)) for each in secrets if text.startswith(each, at)]
    result, end = "", 0
    for begin, until in sorted(places):
        result += f"{text[end:begin]}***" if begin >= end else ""
        end = max(end, until)
    return result + text[end:]


def pieces_of(text: str, ends: Sequence[int]) -> Iterator[str]:
    cuts = sorted({0, len(text), *(end % (len(text) + 1) for end in ends)})
    yield from (text[begin:end] for begin, end in pairwise(cuts))


@given(printed(), st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=20))
@settings(max_examples=400, deadline=None)
def test_no_secret_is_shown_and_the_rest_is(drawn: tuple[list[str], str], cuts: list[tuple[int, bool]]) -> None:
    secrets, text = drawn
    values._variables, values._values, values._pattern = {}, frozenset(), None
    declare({f"SECRET_{number}": secret for number, secret in enumerate(secrets)})
    raw = io.StringIO(newline="")
    stream = MaskedStream(raw, "stdout")
    flushes = [is_flushed for _, is_flushed in cuts] or [True]
    for number, piece in enumerate(pieces_of(text, [end for end, _ in cuts])):
        assert stream.write(piece) == len(piece)
        if flushes[number % len(flushes)]:
            stream.flush()
    stream.release()
    assert raw.getvalue() == shown(text, secrets)


class Slow(io.StringIO):
    """Stream that lets other threads go on while it writes."""

    def write(self, text: str) -> int:
        time.sleep(0)
        return super().write(text)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
@given(printed(), st.lists(st.integers(0, 200), max_size=20))
@settings(max_examples=40, deadline=None)
def test_threads_that_flush_change_neither_what_is_shown_nor_its_order(
    drawn: tuple[list[str], str], cuts: list[int]
) -> None:
    secrets, text = drawn
    text *= 10
    values._variables, values._values, values._pattern = {}, frozenset(), None
    declare({f"SECRET_{number}": secret for number, secret in enumerate(secrets)})
    raw = Slow(newline="")
    stream = MaskedStream(raw, "stdout")
    has_ended = threading.Event()

    def flush_always() -> None:
        while not has_ended.is_set():
            stream.flush()

    threads = [threading.Thread(target=flush_always) for _ in range(3)]
    for thread in threads:
        thread.start()
    for piece in pieces_of(text, cuts):
        stream.write(piece)
    has_ended.set()
    for thread in threads:
        thread.join()
    stream.release()
    assert raw.getvalue() == shown(text, secrets)


@pytest.mark.parametrize("secret", ["s3cr3t-keys", "hunter2hunter2", "0a1b2c3d4e5f60", "abc123abc123abc"])
def test_a_secret_that_begins_as_it_ends_is_masked_before_its_line_is_complete(secret: str) -> None:
    declare({"PHRASE": secret})
    raw = io.StringIO()
    stream = MaskedStream(raw, "stdout")
    print("key", secret, end="", flush=True, file=stream)
    print(" and", secret, flush=True, file=stream)
    assert raw.getvalue() == "key *** and ***\n"


def test_a_shape_is_known_by_the_pieces_of_its_line_that_are_shown_already() -> None:
    raw = io.StringIO()
    stream = MaskedStream(raw, "stdout")
    for piece in ("login with password=", "hunter2-", "sesame", " done", "\n", "hunter2\n"):
        print(piece, end="", flush=True, file=stream)
    assert raw.getvalue() == "login with password=*** done\nhunter2\n"


def test_a_colour_that_is_printed_in_pieces_does_not_show_a_secret() -> None:
    declare({"PHRASE": "open-sesame"})
    raw = io.StringIO()
    stream = MaskedStream(raw, "stdout")
    for piece in ("\x1b[1mopen\x1b", "[3", "1m-ses\x1b[0m", "ame\n"):
        print(piece, end="", flush=True, file=stream)
    assert raw.getvalue() == "\x1b[1m***\x1b[31m\x1b[0m\n"


def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "WAIT_S", 1e6)
    raw = io.StringIO()
    stream = MaskedStream(raw, "stdout")
    taker = threading.Thread(target=stream._lock.acquire)
    taker.start()
    taker.join()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    stream.write("from the fork\n")
    assert raw.getvalue() == "from the fork\n"


def test_a_thread_does_not_wait_for_ever_for_one_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "WAIT_S", 0.01)
    raw = io.StringIO()
    stream = MaskedStream(raw, "stdout")
    taker = threading.Thread(target=stream._lock.acquire)
    taker.start()
    taker.join()
    stream.write("at last\n")
    assert raw.getvalue() == "at last\n"
