"""A function on several ranks of Horovod: real processes, which meet at our rendezvous, as in a worker group."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ranks import on_ranks

from undula.elastic.pure.spec import HorovodSpec
from undula.elastic.ray.horovod import begin, places
from undula.elastic.rendezvous import RendezvousServer
from undula.recovery.worker_state import WorkerState


@contextmanager
def meeting_place() -> Iterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1")
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def rank_variables(server: RendezvousServer, world_size: int, spec: HorovodSpec) -> list[dict[str, str]]:
    """Of a new group's ranks, each on a host of its own."""
    common = {**spec.variables("1", has_gpus=False), **server.begin_group(), "HOROVOD_GLOO_IFACE": "lo"}
    return [{**common, **place} for place in places([str(rank) for rank in range(world_size)])]


def on_horovod_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """function(rank, world_size, *arguments) in one process a rank, after hvd.init(); results by rank."""
    with meeting_place() as server:
        return on_ranks(
            world_size, _with_horovod, rank_variables(server, world_size, HorovodSpec()), function, arguments
        )


def _with_horovod(
    rank: int,
    world_size: int,
    by_rank: list[dict[str, str]],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    import horovod.torch as hvd

    begin(by_rank[rank], WorkerState())
    assert (hvd.rank(), hvd.size()) == (rank, world_size)
    try:
        return function(rank, world_size, *arguments)
    finally:
        hvd.shutdown()
