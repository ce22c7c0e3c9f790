"""Tests of the way of a replica from its rank to the controller: who sends when, and what a refusal costs."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from ray.exceptions import ObjectStoreFullError

from undula.elastic.ray.controller import ElasticController
from undula.recovery import replica, replica_store
from undula.recovery.replica import ReplicaClient
from undula.recovery.replica_store import ReplicaStore
from undula.recovery.snapshot import packed
from undula.state.events import WarningEvent
from undula.state.pieces import Piece, RankState


def answered(value: bool) -> "Future[bool]":
    answer: Future[bool] = Future()
    answer.set_result(value)
    return answer


def elsewhere(controller: Any = None) -> ReplicaClient:
    return ReplicaClient(controller, 0, 2, is_elsewhere=True, shares_node=True)


def test_a_rank_that_was_refused_sends_no_more() -> None:
    client = elsewhere()
    assert client.is_due(is_whole=False)
    client.sender(100)
    assert not client.is_due(is_whole=False)
    client._arrived(answered(False))
    client._next = 0.0
    assert not client.is_on_its_way
    assert not client.is_due(is_whole=False)


def test_a_replica_for_which_the_object_store_has_no_room_does_not_hold_up_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica.ray, "put", Mock(side_effect=ObjectStoreFullError))
    client = elsewhere(Mock())
    client.sender(100)(b"{}", memoryview(bytes(8)))
    assert not client.is_on_its_way
    client._next = 0.0
    assert client.is_due(is_whole=False)


def test_the_pause_after_a_replica_follows_the_slowest_rank() -> None:
    client = elsewhere()
    client.sender(100)
    client._began -= 1.0
    client._arrived(answered(True))
    pause = client._next
    client._began -= 2.0
    client.still_on_its_way()  # another rank needs three times as long
    assert client._next > pause + 30.0


class Controller:
    """The part of ElasticController that stores replicas, without Ray."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.moved = 0
        pool = SimpleNamespace(replicas=ReplicaStore())
        self.own: Any = SimpleNamespace(_pool=pool, _events=self.events.append, _has_reported_refusal=False)

    def store(self, rank: int, step: int) -> bool:
        piece = Piece(torch.full((2**20,), rank, dtype=torch.uint8), (2**21,), (rank * 2**20,), is_replicated=False)
        meta, data = packed("plan", (1, step), RankState({"w": piece}, {}), [])

        async def moved() -> Any:
            self.moved += 1
            return np.frombuffer(data, np.uint8)

        async def store() -> bool:
            reference = moved()
            try:
                return await ElasticController.store_replica(self.own, rank, 2, meta, [reference], 2**21)  # type: ignore[list-item]
            finally:
                reference.close()

        return asyncio.run(store())


def test_a_refused_replica_is_not_moved_to_the_head_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_store, "available_memory", lambda: 3 * 2**20)
    controller = Controller()
    assert not any(controller.store(rank, step) for step in (1, 2) for rank in (0, 1))
    assert controller.moved == 0
    (event,) = controller.events
    assert isinstance(event, WarningEvent)
    assert (event.code, event.step) == ("no_replicas", 1)
    assert "two copies of 2 MiB would take more than the 2 MiB" in event.message


def test_the_parts_of_a_state_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_store, "available_memory", lambda: 8 * 2**20)
    controller = Controller()
    assert all(controller.store(rank, 1) for rank in (0, 1))
    store = controller.own._pool.replicas
    assert store.newest_whole == (1, 1)
    assert [sorted({*each.data}) for each in store.share(0, 1)] == [[0], [1]]
    assert controller.store(1, 1)  # the state is complete without this part
    assert controller.moved == 2
    assert controller.events == []
