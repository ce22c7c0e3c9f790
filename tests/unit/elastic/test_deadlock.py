"""Tests of deadlocks that a script makes: they are told apart from slow collectives, and named by call, line and rank."""

import pickle
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from night import at_night
from numbers_job import begin, cpu_run, network, numbers_job
from ranks import on_ranks
from waiting import wait_until

from undula.elastic.pure.deadlock import ENDED, CollectiveWait, deadlock
from undula.elastic.sockets import cut_connections, listening_ports
from undula.elastic.waits import present_wait
from undula.parallel.spec import ShardingSpec
from undula.train.job import Job


def wait(operation: str, **begun: int) -> CollectiveWait:
    return CollectiveWait(operation, f"{operation}()", "train.py:7", begun)


@pytest.mark.parametrize(
    ("waits", "is_deadlock"),
    [
        ([wait("barrier", a=3), wait("all_reduce", a=3)], True),
        ([wait("barrier", a=3, b=1), wait("barrier", a=4, b=0)], True),
        ([wait("barrier", script=1, transfers=9), wait("await_messages", script=0, transfers=10)], True),
        ([wait("all_reduce", control=5, transfers=10), wait("await_messages", control=4, transfers=9)], False),
        ([wait("await_messages", control=4, transfers=10), wait("await_messages", control=4, transfers=9)], False),
        ([wait("all_reduce", a=3), wait("all_reduce", a=3), wait("gather", a=3)], True),
        ([wait("all_reduce", a=3), wait("all_reduce", a=3)], False),  # slow, and may end
        ([wait("all_reduce", a=3), wait("all_gather", a=4)], False),  # one rank has what the other still receives
        ([wait("barrier", a=3), None], False),  # the other rank still works
        ([wait("barrier", a=3)], False),
        ([wait("barrier", a=3), wait(ENDED, a=2)], True),
        ([wait(ENDED, a=2, b=1), wait(ENDED, a=2, b=1), wait("all_gather", a=3, b=1)], True),
        ([wait("barrier", a=3), wait(ENDED, a=3)], False),  # the other rank has sent its part
        ([wait(ENDED, a=3), wait(ENDED, a=2)], False),
    ],
)
def test_ranks_wait_for_each_other_only_where_no_collective_can_end(waits: list[Any], is_deadlock: bool) -> None:
    assert (deadlock(waits) is not None) == is_deadlock


def test_the_message_names_ranks_by_call_and_line_and_few_of_them() -> None:
    waits = [wait("barrier", a=1), *[CollectiveWait("all_reduce", "update()", "train.py:9", {"a": 1})] * 6]
    assert (deadlock(waits) or "").startswith(
        "the workers wait for each other in different collectives: rank 0 in barrier() at train.py:7, ranks 1, 2, 3, 4, ... in update() at "
        "train.py:9; all workers must"
    )
    ended = deadlock([wait("barrier", a=3), wait(ENDED, a=2)]) or ""
    assert "rank 0 in barrier() at train.py:7, rank 1 at the end of the script; all workers must" in ended


FREEZE = "step.batches() after a change of requires_grad"
HABITS = {
    "barrier()": "dist.barrier()",
    "full_tensor()": "next(model.parameters()).full_tensor()",
    "a forward pass": "model(torch.ones(2, 1))",
    "gather_object()": "dist.gather_object(1, [None, None])",
    "gather()": "run.gather(1)",
    FREEZE: "next(model.parameters()).requires_grad_(False)",
    "an operation with a sharded tensor": "model[0].weight.mean()",
    "total()": "step.total(1.0)",
    "all_reduce()": "dist.all_reduce(torch.ones(1_000_000))",
    "broadcast()": "dist.broadcast(torch.ones(1, dtype=torch.uint8), 0)",
    "all_gather()": "dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3))",
}
"""What a script does on rank 0 alone, by the name of the call."""
SCRIPT = """
import torch
import torch.distributed as dist

def train(run, model):
    for step in run.steps():
        for batch in step.batches():
            step.backward(model(batch["x"][:, None] / 48).square().mean())
        if run.rank == 0 and step.index == 1 and BEFORE:
            HABIT
        step.update()
        if run.rank == 0 and step.index == 1 and not BEFORE:
            HABIT
"""


def _stuck(rank: int, world_size: int, job: Job, habit: str, is_before: bool, folder: Path) -> str:
    """Return the message about the ranks, whose training threads wait for ever."""
    run, script = cpu_run(job, rank, world_size), dict[str, Any]()
    code = SCRIPT.replace("HABIT", HABITS[habit]).replace("BEFORE", str(is_before))
    exec(compile(code, "/home/me/train.py", "exec"), script)
    thread = threading.Thread(target=script["train"], args=(run, begin(run, network())), daemon=True)
    thread.start()
    messages: list[str | None] = []

    def is_stuck() -> bool:
        """Return whether the ranks have been in one deadlock for a while, of which each writes where it waits."""
        new = folder / f"{rank}-new"
        new.write_bytes(pickle.dumps(present_wait(thread.ident)))
        new.rename(folder / str(rank))
        paths = [folder / str(each) for each in range(world_size)]
        messages.append(deadlock([pickle.loads(each.read_bytes()) if each.exists() else None for each in paths]))
        return len(messages) > 20 and len(set(messages[-20:])) == 1 and messages[-1] is not None

    wait_until(is_stuck, limit_s=120, interval_s=0.05)
    (folder / f"{rank}-ended").touch()
    wait_until(lambda: all((folder / f"{each}-ended").exists() for each in range(world_size)))
    cut_connections(listening_ports())
    thread.join()
    return str(messages[-1])


@pytest.mark.parametrize(
    ("habit", "is_before", "stage"),
    [
        *((habit, True, 3) for habit in ("full_tensor()", "a forward pass", "all_reduce()")),
        *((habit, False, 3) for habit in ("full_tensor()", "gather()")),
        *((habit, False, 0) for habit in ("barrier()", "total()", FREEZE)),
        *at_night(
            (habit, True, 3)
            for habit in HABITS
            if habit not in ("full_tensor()", "a forward pass", "all_reduce()", FREEZE)
        ),
        *at_night([("a forward pass", False, 3), ("gather()", False, 0), (FREEZE, False, 3)]),
    ],
)
def test_a_collective_on_one_rank_alone_is_named_with_its_line(
    tmp_path: Path, habit: str, is_before: bool, stage: Literal[0, 3]
) -> None:
    """Before the update, the other rank waits in it; after it, in the next step, whose gradients unsharded models exchange pairwise."""
    job = replace(numbers_job(tmp_path), sharding=ShardingSpec(stage))
    line = 7 if habit == FREEZE else 10 if is_before else 13
    then = r"update\(\) at train.py:11" if is_before else r".* at train.py:(6|8|11)"
    for message in on_ranks(2, _stuck, job, habit, is_before, tmp_path):
        pattern = rf": rank 0 in {re.escape(habit)} at train\.py:{line}, rank 1 in {then}; all workers must"
        assert re.search(pattern, message), message
