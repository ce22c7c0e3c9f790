"""Tests of declared secrets in texts and in what a process prints."""

import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from ray import cloudpickle

from undula.masking.exceptions import mask_error
from undula.masking.output import MaskedStream
from undula.masking.values import NAMES, declare, declared_in, forms_of, mask, masked
from undula.state.events import FailEvent, read_event

SECRET = "blue/Sesame & 'four\""
KEY = "-----BEGIN-----\nMIIEowIBAAKCAQEA\nzXn8abc/def+ghi==\n-----END-----"


@pytest.mark.parametrize(
    "form", [str, quote, quote_plus, lambda text: quote(text, safe=""), json.dumps, repr, str.split]
)
def test_a_declared_value_is_masked_in_every_form(form: object) -> None:
    declare({"PHRASE": SECRET})
    assert callable(form)
    assert "Sesame" not in mask(f"before {form(SECRET) if form is not str.split else ' '.join(SECRET.split())} after")


def test_each_line_of_a_declared_value_is_masked() -> None:
    declare({"KEY": KEY})
    assert mask(f"key:\n{KEY}\nend") == "key:\n***\n***\n***\n***\nend"
    assert "MIIE" not in mask(repr(KEY)) + mask(json.dumps({"key": KEY})) + mask(
        "zXn8abc/def+ghi==\n  MIIEowIBAAKCAQEA"
    )


@pytest.mark.parametrize("value", ["", "1", "true", "INFO", "12345", "------------", "0000000000"])
def test_a_short_or_trivial_value_is_not_masked(value: str) -> None:
    declare({"SETTING": value})
    assert forms_of(value) == set()
    assert mask(f"level {value}, 12345 of 100000 ------------") == f"level {value}, 12345 of 100000 ------------"


def test_the_longest_of_overlapping_values_is_masked() -> None:
    declare({"A": "sesame", "B": "sesame-street"})
    assert mask("sesame-street and sesame") == "*** and ***"


def test_a_value_stays_known_when_its_variable_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHRASE", "open-sesame")
    declare({"PHRASE": "open-sesame"})
    monkeypatch.delenv("PHRASE")
    assert mask("open-sesame") == "***"


def test_all_texts_of_a_tree_are_masked() -> None:
    declare({"PHRASE": "open-sesame"})
    assert masked({"a": ["open-sesame", 1], "b": {"c": "x open-sesame"}, "d": None}) == {
        "a": ["***", 1],
        "b": {"c": "x ***"},
        "d": None,
    }


def test_a_value_that_is_printed_in_pieces_is_masked() -> None:
    declare({"PHRASE": "open-sesame"})
    for end in range(1, len("open-sesame")):
        raw = io.StringIO()
        stream = MaskedStream(raw, "stdout")
        for piece in ("now: open-sesame"[: 5 + end], "open-sesame"[end:], "\n"):
            stream.write(piece)
            stream.flush()
        assert raw.getvalue() == "now: ***\n"


def test_what_cannot_begin_a_secret_is_shown_when_it_is_flushed() -> None:
    declare({"PHRASE": "open-sesame"})
    raw = io.StringIO()
    stream = MaskedStream(raw, "stdout")
    stream.write("\r 10% of all")
    stream.flush()
    assert raw.getvalue() == "\r 10% of all"
    stream.write(", then stop")
    stream.release()
    assert raw.getvalue() == "\r 10% of all, then stop"


def test_an_object_with_the_stream_can_be_sent_to_another_process() -> None:
    copy = pickle.loads(cloudpickle.dumps({"out": MaskedStream(sys.stderr, "stderr")}))
    assert copy == {"out": sys.stderr}


PROGRAM = """
import logging, os, sys
logging.basicConfig()
from undula.masking.output import mask_output
mask_output()
mask_output()
phrase = os.environ.pop("PHRASE")
logging.getLogger("b").addHandler(logging.FileHandler("b.log"))
logging.getLogger("b").propagate = False
try:
    raise KeyError(phrase)
except KeyError:
    logging.getLogger("b").exception("%d %s", 1, phrase)
print("printed", phrase, end="")
sys.stdout.writelines(["lines ", phrase, "\\n"])
logging.getLogger("a").warning("logged %s", phrase)
print(f"https://me:{phrase[:4]}@host", end="")
raise ValueError(f"raised {phrase}")
"""


def test_a_process_masks_what_it_prints_logs_and_raises(tmp_path: Path) -> None:
    env = {"PYTHONPATH": ":".join(sys.path), "PHRASE": "open-sesame", NAMES: '["PHRASE", "MISSING"]'}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "printed ***lines ***\nhttps://me:***@host"
    assert "WARNING:a:logged ***\n" in done.stderr
    assert done.stderr.endswith("ValueError: raised ***\n")
    assert "sesame" not in done.stderr
    logged = (tmp_path / "b.log").read_text()
    assert logged.startswith("1 ***\nTraceback")
    assert logged.endswith("KeyError: '***'\n")
    assert declared_in(env) == {"PHRASE": "open-sesame"}


def test_an_exception_is_masked_with_those_that_it_follows_from() -> None:
    declare({"PHRASE": "open-sesame"})
    error = subprocess.CalledProcessError(1, ["login", "open-sesame"])
    error.__cause__ = OSError(2, "no open-sesame", "/keys/open-sesame")
    error.__cause__.__context__ = error
    mask_error(error)
    assert str(error) == "Command '['login', '***']' returned non-zero exit status 1."
    assert str(error.__cause__) == "[Errno 2] no ***: '/keys/***'"


def test_an_event_is_masked_when_it_is_written_and_when_it_is_read() -> None:
    declare({"PHRASE": "open-sesame"})
    row = FailEvent("KeyError: 'open-sesame' at https://me:pa/ss@host").row()
    assert "sesame" not in str(row)
    former = {**row, "data": json.dumps({"error": "https://me:hunter22@host"}), "message": "https://me:hunter22@host"}
    assert "hunter22" not in str(read_event(former).row()) + str(read_event({**former, "kind": "unknown"}))
