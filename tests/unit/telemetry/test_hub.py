"""Tests that the follower of a hub passes on every message once and in order. The hub is a local object, without Ray."""

import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from undula.storage import Store
from undula.telemetry import hub as hubs
from undula.telemetry.hub import LOST, Hub, HubFollower, output_to_driver
from undula.telemetry.messages import Line, Message


def test_messages_are_passed_on_in_the_block_and_the_last_ones_do_not_wait_for_the_next_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs.ray, "get", lambda value: value)
    hub = Hub(Store(str(tmp_path)))
    handle = SimpleNamespace(read=SimpleNamespace(remote=hub.read))
    received: list[Message] = []
    arrived = threading.Event()

    def receive(messages: list[Message]) -> None:
        received.extend(messages)
        if len(received) == 2:
            arrived.set()

    with HubFollower(handle, receive, interval_s=0.001):
        hub.publish(Line(0, "first"))
        hub.publish(Line(0, "second"))
        assert arrived.wait(10)
    assert received == [Line(0, "first"), Line(0, "second")]

    with HubFollower(handle, received.extend, interval_s=1000):
        hub.publish(Line(0, "last"))
    assert received[2:] == [Line(0, "first"), Line(0, "second"), Line(0, "last")]


def test_a_hub_that_was_lost_ends_the_messages_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(value: object) -> object:
        raise RayActorError

    monkeypatch.setattr(hubs.ray, "get", lost)
    handle = SimpleNamespace(read=SimpleNamespace(remote=lambda start: None))
    with HubFollower(handle, lambda messages: None, interval_s=0.001):
        pass
    assert capsys.readouterr().err == f"{LOST}\n"


def test_what_a_rank_prints_and_logs_in_any_group_reaches_the_driver(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[Message] = []
    logger, handlers = logging.getLogger("of the script"), logging.root.handlers[:]
    logging.root.handlers.clear()
    try:
        for rank in (1, 0):
            with output_to_driver(lines.append, rank):
                logging.basicConfig(format="%(levelname)s %(message)s")  # only the first call has an effect
                logger.warning("of rank %d", rank)
                sys.stderr.write(" 10 %\r 20 %\r100 %\n")
                print("no line break", end="")
    finally:
        logging.root.handlers[:] = handlers
    assert lines == [
        Line(rank, text) for rank in (1, 0) for text in (f"WARNING of rank {rank}", "100 %", "no line break")
    ]
    shown = capsys.readouterr()
    assert shown.out == "no line breakno line break"
    assert "WARNING of rank 1" in shown.err
