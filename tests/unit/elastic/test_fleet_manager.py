"""Tests of the fleet manager: the nodes that a run requests and releases as nodes come and go."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from undula.elastic.pure.fleet import AVOID_S, FleetManager, Pace, Work
from undula.elastic.pure.nodes import Node
from undula.plan.fleet import MARKET, ON_DEMAND, SPOT, TYPE, Fleet, FleetSpec
from undula.state.events import Event, FleetEvent, IdleEvent, OverdueEvent, RefusalEvent, ReleaseEvent

TOTAL = 100
STEP_S = 10.0
START_S = 60.0


@dataclass
class Run:
    """Run of four workers on one node each. The test sets its clock and its nodes."""

    spec: FleetSpec
    now: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    fewest: int = 1
    began: float = 0.0

    def __post_init__(self) -> None:
        self.fleet = FleetManager(
            self.spec,
            4,
            self.fewest,
            Work(TOTAL, self.began),
            True,
            self.events.append,
            lambda _: self.refused,
        )

    def have(self, market: str | None, *names: str, slots: int = 1) -> None:
        for name in names:
            self.nodes[name] = Node(name, slots, slots, None, market, f"{market}-type")

    def look(self, seconds: float = 1.0, done: int | None = None, idle: tuple[str, ...] = ()) -> Fleet:
        """Let time pass. Nodes without a notice are full of workers, which are ready except on the nodes in `idle`."""
        self.now += seconds
        if done is not None:
            self.fleet.pace = Pace(worker_s=4 * STEP_S * 100, steps=100, done=done)
        own = Counter({node.id: node.free for node in self.nodes.values() if node.deadline is None})
        ready = Counter({node: count for node, count in own.items() if node not in idle})
        full = {node.id: replace(node, free=node.free - own[node.id]) for node in self.nodes.values()}
        self.fleet.update(full, ready, own, self.now)
        return self.fleet.wanted


def deadline(seconds: int) -> Run:
    return Run(FleetSpec(deadline=f"{seconds}s", node_start_s=START_S))


def test_a_job_without_a_policy_takes_any_node_and_releases_none() -> None:
    run = Run(FleetSpec())
    run.have(SPOT, "a")
    run.have(None, "b")
    run.look()
    assert run.fleet.labels == [{}] * 4
    assert not run.fleet.released
    assert run.fleet.room(SPOT, Counter({SPOT: 1, None: 1})) == 2


def test_nodes_of_another_market_are_released() -> None:
    run = Run(FleetSpec(spot_only=True))
    run.have(SPOT, "a", "b")
    run.have(ON_DEMAND, "c")
    run.have(None, "d")  # it exists anyway
    assert run.look() == Fleet(4, 0)
    assert run.fleet.released == {"c"}
    request, release = run.events
    assert isinstance(request, FleetEvent)
    assert (request.spot, request.on_demand, request.time_left_s) == (4, 0, None)
    assert isinstance(release, ReleaseEvent)
    assert (release.node, release.spot, release.on_demand) == ("c", 4, 0)
    assert run.fleet.labels == [{MARKET: SPOT}] * 4
    assert run.fleet.room(ON_DEMAND, Counter()) == 0


def test_the_on_demand_floor_is_requested() -> None:
    run = Run(FleetSpec(on_demand_floor=1))
    run.have(ON_DEMAND, "a", "b")
    run.look(idle=("a",))
    assert run.fleet.labels == [{MARKET: SPOT}] * 3 + [{MARKET: ON_DEMAND}]
    assert run.fleet.released == {"a"}  # the workers on b train


def test_missing_spot_nodes_are_replaced_after_a_wait_while_the_run_is_behind() -> None:
    run = deadline(2000)
    assert run.look() == Fleet(4, 0)
    assert run.look(START_S - 1) == Fleet(4, 0)
    assert run.look(2) == Fleet(4, 4)
    run.have(ON_DEMAND, *"abcd")
    assert run.look(done=1) == Fleet(4, 4)
    assert run.look(done=30) == Fleet(4, 0)  # the run is well ahead of its deadline
    assert run.fleet.released == set("abcd")


def test_an_on_demand_node_stays_until_its_spot_replacement_trains() -> None:
    run = deadline(3000)
    run.look()
    run.look(400)
    run.have(ON_DEMAND, *"abcd")
    assert run.look(done=1) == Fleet(4, 4)
    run.have(SPOT, *"wxyz")
    assert run.look(10, done=2, idle=tuple("wxyz")) == Fleet(4, 4)
    assert run.look(1, done=2, idle=tuple("yz")) == Fleet(4, 2)
    assert len(run.fleet.released & set("abcd")) == 2
    assert run.look(1, done=2) == Fleet(4, 0)
    assert run.fleet.released == set("abcd")


def test_an_urgent_run_releases_spot_nodes_as_their_on_demand_replacements_train() -> None:
    run = deadline(1200)
    run.have(SPOT, "w", "x")
    assert run.look(200, done=10) == Fleet(4, 4)
    assert not run.fleet.released
    run.have(ON_DEMAND, *"abcd")
    assert run.look(done=11, idle=tuple("bcd")) == Fleet(3, 4)
    assert not run.fleet.released
    assert run.look(done=11) == Fleet(0, 4)
    assert run.fleet.released == {"w", "x"}


def test_a_run_stays_urgent_until_it_has_spare_time() -> None:
    run = deadline(1200)
    run.have(SPOT, "w", "x", "y")
    assert run.look(200, done=10) == Fleet(4, 4)
    run.have(SPOT, "z")
    assert run.look(done=11) == Fleet(4, 4)  # all spot nodes exist, but the run still requests on-demand nodes
    assert run.look(done=40) == Fleet(4, 0)


def test_a_run_is_not_urgent_before_its_pace_is_known() -> None:
    run = deadline(1200)
    run.have(SPOT, "w", "x")
    run.fleet.pace = Pace(worker_s=1e6, steps=2, done=2)
    assert run.look(10) == Fleet(4, 0)


def test_no_on_demand_nodes_are_requested_after_the_deadline() -> None:
    run = deadline(1000)
    run.look(1500, done=10)
    assert run.look(done=10) == Fleet(4, 0)
    assert [event.late_s for event in run.events if isinstance(event, OverdueEvent)] == [500.0]


def test_too_few_nodes_are_completed_to_the_minimum() -> None:
    run = Run(FleetSpec(deadline="4000s", node_start_s=START_S), fewest=4)
    run.have(SPOT, "w", "x", "y")
    run.look(done=60)
    assert run.look(START_S + 1, done=60) == Fleet(4, 1)  # the run is well ahead, so a third node would be wasted


def test_resources_in_use_by_others_do_not_count() -> None:
    run = deadline(2000)
    run.have(SPOT, *"wxyz")
    for name in "wxyz":
        run.nodes[name] = replace(run.nodes[name], free=0)
    run.look()
    assert run.look(START_S + 1) == Fleet(4, 4)


def test_unavailable_types_are_only_requested_for_the_existing_nodes() -> None:
    run = Run(FleetSpec())
    run.have(SPOT, "a")
    run.refused = {"a-type": "no capacity", "other-type": ""}
    run.look()
    assert run.fleet.labels == [{TYPE: "spot-type"}] + [{TYPE: "!in(a-type,other-type)"}] * 3
    refusals = [event for event in run.events if isinstance(event, RefusalEvent)]
    assert [(event.node_type, event.reason) for event in refusals] == [("a-type", "no capacity"), ("other-type", "")]
    run.refused = {}
    run.look(AVOID_S)
    assert run.fleet.labels == [{}] * 4
    run.refused = {"a-type": "no capacity"}
    run.look()
    assert [event.kind for event in run.events] == ["refusal"] * 2  # nothing has changed
    run.have(SPOT, "b", "c", "d")
    run.look()
    assert run.fleet.labels == [{}] * 4  # all of them exist


def test_a_new_spot_node_restarts_the_wait_for_others() -> None:
    run = Run(FleetSpec(deadline="4000s", node_start_s=START_S), fewest=2)
    run.look()
    assert run.look(START_S + 1) == Fleet(4, 4)
    run.have(SPOT, "w")
    assert run.look(done=60) == Fleet(4, 0)
    assert run.look(START_S + 1, done=60) == Fleet(4, 1)


def test_a_type_that_is_partly_available_is_reported_once() -> None:
    run = Run(FleetSpec())
    run.have(SPOT, "a")
    run.refused = {"spot-type": ""}
    for _ in range(5):
        run.look()
    assert [event.kind for event in run.events] == ["refusal"]


def test_on_demand_replacements_do_not_end_the_search_for_other_types() -> None:
    run = deadline(3000)
    run.refused = {"spot-type": ""}
    run.have(ON_DEMAND, *"abcd")
    run.look()
    run.look(400, done=1)
    assert run.fleet.labels[0] == {MARKET: SPOT, TYPE: "!in(spot-type)"}


def test_a_node_with_a_notice_does_not_count() -> None:
    run = Run(FleetSpec(on_demand_floor=1))
    run.have(ON_DEMAND, "a", "b")
    run.nodes["b"] = Node("b", 1, 0, 12.0, ON_DEMAND)
    run.look()
    assert not run.fleet.released


def test_unused_room_is_reported_once() -> None:
    run = Run(FleetSpec())
    nodes = {"a": Node("a", 2, 1, None), "b": Node("b", 2, 0, None)}
    for now in (10.0, 60.0, 80.0, 200.0):
        run.fleet.update(nodes, Counter(), Counter({"a": 1, "b": 2}), now)
    (idle,) = run.events
    assert isinstance(idle, IdleEvent)
    assert (idle.node, idle.free, idle.idle_s, idle.most) == ("a", 1, 60.0, 4)


def test_the_pace_only_counts_time_in_worker_groups() -> None:
    pace = Pace()
    pace.observe(0, 2, now=0.0)
    pace.observe(1, 2, now=30.0)  # the first step of a group may compile
    pace.observe(9, 2, now=38.0)
    assert pace.step_s(1) is None  # too few steps
    pace.pause()
    pace.observe(9, 1, now=100.0)
    pace.observe(10, 1, now=101.0)
    pace.observe(16, 1, now=113.0)
    assert pace.step_s(1) == pytest.approx((16.0 + 12.0) / 14)
    assert pace.done == 16


def test_the_pace_follows_recent_steps() -> None:
    pace = Pace()
    for step in range(5000):
        pace.observe(step, 1, now=float(step))
    for step in range(5000, 10000):
        pace.observe(step, 1, now=5000.0 + 3.0 * (step - 5000))
    assert pace.step_s(1) == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize(
    "keys", [{"spot_only": True, "deadline": "6h"}, {"on_demand_floor": 1, "deadline": "6h"}, {"deadline": "soon"}]
)
def test_policies_exclude_each_other(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"both given|deadline"):
        FleetSpec(**keys)


def test_a_deadline_is_in_seconds_minutes_hours_or_days() -> None:
    assert [FleetSpec(deadline=text).deadline_s for text in ("90s", "1.5m", "6h", "2d")] == [90, 90, 21600, 172800]
