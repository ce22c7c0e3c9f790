"""Horovod in a process that was in another group before, beside one that was not: real ranks."""

from typing import Any

import pytest
import torch
from horovod_ranks import meeting_place, rank_variables
from ranks import on_ranks

from undula.elastic.horovod import begin, places
from undula.elastic.spec import HorovodSpec
from undula.run.handover import process

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make horovod")
MIB_OF_FLOATS = 2**18
BOTH = {"fusion_threshold_mib": 2, "cycle_time_ms": 2}


def _with_a_veteran(rank: int, world_size: int, veteran: int, by_rank: list[dict[str, str]]) -> list[float]:
    """One rank has been in a group before. Both bring 3 MiB at once, three times: from the second on each rank fuses what it remembers."""
    import horovod.torch as hvd
    import torch.distributed as dist

    if rank == veteran:
        begin({**by_rank[rank], **places(["alone"])[0]})
        hvd.shutdown()
    begin(by_rank[rank])
    gradients = [torch.full((MIB_OF_FLOATS // 4,), float(number)) for number in range(12)]
    for _ in range(3):
        dist.barrier()
        handles = [hvd.allreduce_async_(each, op=hvd.Sum, name=str(number)) for number, each in enumerate(gradients)]
        for handle in handles:
            hvd.synchronize(handle)
    hvd.shutdown()
    return [float(each.mean()) for each in gradients]


@pytest.mark.parametrize(("veteran", "fields"), [(0, {}), (1, {}), (0, {"fusion_threshold_mib": 2})])
def test_a_process_that_was_in_another_group_fuses_what_a_new_one_does(veteran: int, fields: dict[str, Any]) -> None:
    with meeting_place() as server:
        found = on_ranks(2, _with_a_veteran, veteran, rank_variables(server, 2, HorovodSpec(**fields)))
    assert found == [[8.0 * number for number in range(12)]] * 2


def _is_spent(rank: int, world_size: int, fields: dict[str, Any]) -> bool:
    import horovod.torch as hvd

    begin({**HorovodSpec(**fields).variables("1", has_gpus=False), **places(["alone"])[0]})
    hvd.shutdown()
    return process.is_spent


@pytest.mark.parametrize(
    ("fields", "is_spent"),
    [({}, False), ({"fusion_threshold_mib": 2}, False), (BOTH, True), ({"autotune": True}, True)],
)
def test_a_process_whose_horovod_cannot_begin_again_is_in_no_other_group(
    fields: dict[str, Any], is_spent: bool
) -> None:
    """With both of its parameters fixed, a second `hvd.init()` ends it with SIGSEGV."""
    assert on_ranks(1, _is_spent, fields) == [is_spent]
