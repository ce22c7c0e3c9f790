"""Tests that a group which is smaller than it may be says why, once."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import ScalingConfig

from undula.elastic.pure.policy import Growth, View, WorkerSlot
from undula.elastic.ray import scaling
from undula.elastic.ray.scaling import PoolPolicy
from undula.plan.fleet import FleetSpec
from undula.state.events import Event, StayEvent


@pytest.fixture
def received() -> list[Event]:
    return []


@pytest.fixture
def policy(received: list[Event], monkeypatch: pytest.MonkeyPatch) -> PoolPolicy:
    """Policy of a group that trains on one node."""
    monkeypatch.setattr(scaling, "STAY_S", 0.0)
    fleet = SimpleNamespace(spec=FleetSpec(), pace=SimpleNamespace(pause=lambda: None))
    pool: Any = SimpleNamespace(preparing=0, fleet=fleet, resources={"CPU": 1.0})
    return PoolPolicy(ScalingConfig(num_workers=(1, 2)), "auto", None, pool, received.append)


def view(ready: int, group: int = 1) -> View:
    slots = [WorkerSlot(f"worker {number}", "node", number < group) for number in range(group + ready)]
    return View(1e6, slots, growth=Growth(interval_s=5.0, cost_s=4.0, changes=2))


def test_it_is_said_once_as_long_as_the_group_is_small(policy: PoolPolicy, received: list[Event]) -> None:
    for _ in range(3):
        policy._report_stay(view(0), 2, has_begun=True)
    assert received == [StayEvent(1, 2, "room", 0.0, {"CPU": 1.0}, time=received[0].time)]
    policy._report_stay(view(0, group=2), 2, has_begun=True)
    policy._report_stay(view(0), 2, has_begun=True)
    assert len(received) == 2


def test_ready_workers_that_wait_come_with_the_time_after_which_they_join(
    policy: PoolPolicy, received: list[Event]
) -> None:
    """Two workers lose 8 s and win 5 s. The expected time until the next change grows by half a second per second."""
    policy._report_stay(view(1), 2, has_begun=False)
    policy._report_stay(view(1), 2, has_begun=True)
    (event,) = received
    assert "they join in about 6 s if nothing changes until then (workers.grow: auto)." in event.message
    policy._resize(2)
    policy._report_stay(view(1), 2, has_begun=True)
    assert len(received) == 2, "the next group has its own reason"


def test_a_policy_for_nodes_may_want_a_small_group(policy: PoolPolicy, received: list[Event]) -> None:
    policy.pool.fleet.spec = FleetSpec(spot_only=True)
    policy._report_stay(view(0), 2, has_begun=True)
    assert not received
