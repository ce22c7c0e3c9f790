"""Which nodes a run asks for and gives back, as nodes come and go."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from undula.elastic.capacity import Node
from undula.elastic.fleet import AVOID_S, FleetManager, Pace, Work
from undula.plan.fleet import MARKET, ON_DEMAND, SPOT, TYPE, Fleet, FleetSpec

TOTAL = 100
STEP_S = 10.0
START_S = 60.0


@dataclass
class Run:
    """A run of four workers, each on a node of its own, whose clock and nodes the test moves."""

    spec: FleetSpec
    now: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fleet = FleetManager(
            self.spec, 4, Work(TOTAL, 0.0), lambda event: self.told.append(event.message), lambda _: self.refused
        )

    def have(self, market: str | None, *names: str, slots: int = 1) -> None:
        for name in names:
            self.nodes[name] = Node(name, slots, 0, None, market, f"{market}-type")

    def look(self, seconds: float = 1.0, done: int | None = None, idle: tuple[str, ...] = ()) -> Fleet:
        """Let time pass; nodes have a worker that is ready but for those in `idle`."""
        self.now += seconds
        if done is not None:
            self.fleet.pace = Pace(worker_s=4 * STEP_S * done, steps=done, done=done)
        workers = Counter({node.id: node.slots for node in self.nodes.values() if node.id not in idle})
        self.fleet.look(self.nodes, workers, self.now)
        return self.fleet.wanted


def deadline(seconds: int) -> Run:
    return Run(FleetSpec(deadline=f"{seconds}s", node_start_s=START_S))


def test_a_job_without_a_policy_takes_any_node_and_gives_none_back() -> None:
    run = Run(FleetSpec())
    run.have(SPOT, "a")
    run.have(None, "b")
    run.look()
    assert run.fleet.labels == [{}] * 4
    assert not run.fleet.given_back
    assert run.fleet.room(SPOT, Counter({SPOT: 1, None: 1})) == 2


def test_nodes_of_another_market_are_given_back() -> None:
    run = Run(FleetSpec(spot_only=True))
    run.have(SPOT, "a", "b")
    run.have(ON_DEMAND, "c")
    run.have(None, "d")  # is there anyway
    assert run.look() == Fleet(4, 0)
    assert run.fleet.given_back == {"c"}
    assert run.fleet.labels == [{MARKET: SPOT}] * 4
    assert run.fleet.room(ON_DEMAND, Counter()) == 0


def test_a_floor_is_asked_for_on_demand() -> None:
    run = Run(FleetSpec(on_demand_floor=1))
    run.have(ON_DEMAND, "a", "b")
    run.look(idle=("a",))
    assert run.fleet.labels == [{MARKET: SPOT}] * 3 + [{MARKET: ON_DEMAND}]
    assert run.fleet.given_back == {"a"}  # b trains


def test_spot_nodes_that_do_not_come_are_waited_for_and_then_replaced_as_long_as_the_run_is_behind() -> None:
    run = deadline(2000)
    assert run.look() == Fleet(4, 0)
    assert run.look(START_S - 1) == Fleet(4, 0)
    assert run.look(2) == Fleet(4, 4)
    run.have(ON_DEMAND, *"abcd")
    assert run.look(done=1) == Fleet(4, 4)
    assert run.look(done=30) == Fleet(4, 0)  # well ahead of what is expected by now
    assert run.fleet.given_back == set("abcd")


def test_an_on_demand_node_stays_until_a_spot_node_in_its_place_trains() -> None:
    run = deadline(3000)
    run.look()
    run.look(400)
    run.have(ON_DEMAND, *"abcd")
    assert run.look(done=1) == Fleet(4, 4)
    run.have(SPOT, *"wxyz")
    assert run.look(10, done=2, idle=tuple("wxyz")) == Fleet(4, 4)
    assert run.look(1, done=2, idle=tuple("yz")) == Fleet(4, 2)
    assert len(run.fleet.given_back & set("abcd")) == 2
    assert run.look(1, done=2) == Fleet(4, 0)
    assert run.fleet.given_back == set("abcd")


def test_in_a_hurry_spot_nodes_go_when_on_demand_ones_train_in_their_place() -> None:
    run = deadline(1200)
    run.have(SPOT, "w", "x")
    assert run.look(200, done=10) == Fleet(0, 4)
    assert not run.fleet.given_back
    run.have(ON_DEMAND, *"abcd")
    run.look(done=11, idle=tuple("bcd"))
    assert not run.fleet.given_back
    run.look(done=11)
    assert run.fleet.given_back == {"w", "x"}


def test_types_that_are_not_to_be_had_are_asked_for_no_more_but_for_those_that_are_there() -> None:
    run = Run(FleetSpec())
    run.have(SPOT, "a")
    run.refused = {"spot-type": "no capacity", "other-type": ""}
    run.look()
    assert run.fleet.labels == [{TYPE: "spot-type"}] + [{TYPE: "!in(other-type,spot-type)"}] * 3
    assert run.told[0] == "other-type is not to be had: other types are asked for, for 60 s"
    run.look(AVOID_S)
    assert len(run.told) == 2
    run.refused = {}
    run.look()
    assert run.fleet.labels == [{}] * 4


def test_a_node_that_will_go_is_as_one_that_is_not_there() -> None:
    run = Run(FleetSpec(on_demand_floor=1))
    run.have(ON_DEMAND, "a", "b")
    run.nodes["b"] = Node("b", 1, 0, 12.0, ON_DEMAND)
    run.look()
    assert not run.fleet.given_back


def test_a_node_that_nobody_uses_is_told_once() -> None:
    run = Run(FleetSpec())
    run.nodes["a"] = Node("a", 2, 2, None)
    run.nodes["b"] = Node("b", 2, 1, None)
    for _ in range(3):
        run.look(45)
    assert run.told == ["node a is held, and nothing has run there for 60 s"]


def test_a_pace_is_of_the_time_in_groups_alone() -> None:
    pace = Pace()
    pace.saw(0, 2, now=0.0)
    pace.saw(0, 2, now=3.0)
    pace.saw(4, 2, now=8.0)
    pace.pause()
    pace.saw(4, 1, now=100.0)
    pace.saw(6, 1, now=108.0)
    assert pace.step_s(1) == pytest.approx((16.0 + 8.0) / 6)
    assert pace.done == 6


@pytest.mark.parametrize(
    "keys", [{"spot_only": True, "deadline": "6h"}, {"on_demand_floor": 1, "deadline": "6h"}, {"deadline": "soon"}]
)
def test_policies_exclude_each_other(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"both given|deadline"):
        FleetSpec(**keys)


def test_a_deadline_is_in_seconds_minutes_hours_or_days() -> None:
    assert [FleetSpec(deadline=text).deadline_s for text in ("90s", "1.5m", "6h", "2d")] == [90, 90, 21600, 172800]
