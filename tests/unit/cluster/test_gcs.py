"""Tests of requests to a head that does not answer. A stand-in replaces the process that asks, as Ray's takes seconds to start."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from undula.elastic.ray.gcs import Head
from undula.errors import ClusterError

STAND_IN = """#!/bin/sh
while read -r command rest; do
  case $command in
    hello) echo true ;;
    silent) exec sleep 60 ;;
    garbage) echo '{"half'; echo "another's answer" ;;
    *) echo $$ ;;
  esac
done
"""


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    head = Head("10.0.0.1:6379", {}, limit_s=0.3)
    yield head
    head.close()


@pytest.mark.parametrize("command", ["silent", "garbage"])
def test_a_request_without_an_answer_ends_at_the_limit_and_the_next_one_starts_a_new_process(
    head: Head, command: str
) -> None:
    first = head.ask("pid")
    assert head.ask("pid") == first
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"10\.0\.0\.1:6379 does not answer"):
        head.ask(command)
    assert time.monotonic() - began < 10
    assert head.ask("pid") != first


def test_a_closed_head_starts_no_new_process(head: Head) -> None:
    head.close()
    with pytest.raises(ClusterError):
        head.ask("pid")


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), -7.0, 1e300, 7.0])
def test_an_invalid_drain_is_refused(head: Head, deadline: float) -> None:
    """The last deadline is valid; that drain is refused because its answer is not one of Ray's."""
    with pytest.raises(ClusterError, match="cannot be drained"):
        head.drain("0123456789abcdef", deadline)
