"""Synthetic run on labelled machines, to show the report of its cost: `python -m tests.priced_run FOLDER && undula show FOLDER`.

The run takes four hours. Two spot nodes train for an hour. One gets a notice, and an on-demand node replaces it 15 minutes later.
Then both nodes are lost, one node waits 20 minutes for a second one, and two spot nodes train to the end.
Ten minutes of steps are replayed.
"""

import json
import sys
from collections.abc import Sequence

from undula.state.events import CrashEvent, EndEvent, GroupEvent, NoticeEvent, StartEvent, WaitingEvent, WorkerPlace
from undula.state.ledger import EventWriter, LedgerWriter
from undula.state.records import StepRow
from undula.storage import Store

BEGAN = 1_795_233_000.0
STEP_S = 10.0
SPOT, ON_DEMAND = ("g6.xlarge", "spot"), ("g6.xlarge", "on-demand")


def group(minute: float, *machines: tuple[str, str], step: int = 0) -> GroupEvent:
    return GroupEvent(workers(machines), step=step, time=at(minute))


def waiting(minute: float, *machines: tuple[str, str]) -> WaitingEvent:
    return WaitingEvent(len(machines), needed=len(machines) + 1, workers=workers(machines), time=at(minute))


def workers(machines: Sequence[tuple[str, str]]) -> tuple[WorkerPlace, ...]:
    """Return workers on one node each. A machine without a name has no label."""
    places: list[WorkerPlace] = []
    for rank, (machine, market) in enumerate(machines):
        place: WorkerPlace = {"rank": rank, "node": f"node-{rank}-{machine}-{market}", "pid": rank}
        places.append({**place, "machine": machine, "market": market} if machine else place)
    return tuple(places)


def at(minute: float) -> float:
    return BEGAN + 60 * minute


def write_priced_run(store: Store, other: tuple[str, str] = ON_DEMAND, spot: tuple[str, str] = SPOT) -> None:
    """Write the run directory. `other` is the machine that replaces the one with a notice; `spot` is that of all other nodes."""
    store.write("job.json", json.dumps({"name": "spot-run", "total_steps": 1178, "total_samples": 1178 * 64}).encode())
    events = EventWriter(store, "test")
    for event in (
        StartEvent(2, 1, step=0, time=at(0)),
        group(0, spot, spot),
        NoticeEvent("node-1", (1,), at(62), time=at(60)),
        group(61, spot),
        group(76, spot, other),
        CrashEvent("failure", "two nodes were lost", time=at(150)),
        group(151, spot),
        waiting(152, spot),
        group(172, spot, spot),
        EndEvent(time=at(240)),
    ):
        events.event(event)
    step = 0
    for attempt, (first, last, world_size) in enumerate(
        ((2, 60, 2), (61.5, 75.5, 1), (76.5, 150, 2), (174, 240, 2)), 1
    ):
        step -= 60 if attempt == 4 else 0
        ledger, now = LedgerWriter(store, attempt), at(first)
        while now + STEP_S <= at(last):
            blocked_s = 15.0 if step % 60 == 59 else 0.0
            now += STEP_S + blocked_s
            ledger.step(
                StepRow(
                    *(attempt, step, 0, (step + 1) * 64, 64, world_size, 4 - step / 600, 1e-3),
                    *(0.3, STEP_S - 1.3, 0.8, 0.2, 0, now),
                    blocked_s=blocked_s,
                )
            )
            step += 1
        ledger.close()


if __name__ == "__main__":
    write_priced_run(Store(sys.argv[1]))
