"""Tests that the follower of a hub hands on every message once and in order. The hub is a local object, without Ray."""

import threading
from pathlib import Path
from typing import Any

import pytest

from undula.storage import Store
from undula.telemetry import follower
from undula.telemetry.follower import HubFollower
from undula.telemetry.hub import Hub
from undula.telemetry.messages import Line, Message


class LocalHub(Hub):
    """Hub with the interface of an actor handle."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name != "read":
            return found
        return type("Method", (), {"remote": staticmethod(found)})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LocalHub:
    monkeypatch.setattr(follower.ray, "get", lambda value: value)
    return LocalHub(Store(str(tmp_path)))


def test_messages_are_handed_on_while_the_block_runs(hub: LocalHub) -> None:
    handed: list[Message] = []
    arrived = threading.Event()

    def handle(messages: list[Message]) -> None:
        handed.extend(messages)
        if len(handed) == 2:
            arrived.set()

    with HubFollower(hub, handle, interval_s=0.001):
        hub.publish(Line(0, "first"))
        hub.publish(Line(0, "second"))
        assert arrived.wait(10)
    assert handed == [Line(0, "first"), Line(0, "second")]


def test_the_last_messages_are_handed_on_without_waiting_for_the_next_read(hub: LocalHub) -> None:
    handed: list[Message] = []
    with HubFollower(hub, handed.extend, interval_s=1000):
        hub.publish(Line(0, "last"))
    assert handed == [Line(0, "last")]
