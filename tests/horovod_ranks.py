"""A function on several ranks of Horovod: real processes, which meet at our rendezvous, as in a worker group."""

import os
from collections.abc import Callable
from typing import Any

from ranks import on_ranks

from undula.elastic.horovod import places
from undula.elastic.rendezvous import RendezvousServer
from undula.elastic.spec import HorovodSpec


def on_horovod_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """function(rank, world_size, *arguments) in one process a rank, after hvd.init(); results by rank."""
    server = RendezvousServer("127.0.0.1")
    common = {**HorovodSpec().variables("1", has_gpus=False), **server.begin_group(), "HOROVOD_GLOO_IFACE": "lo"}
    by_rank = [{**common, **place} for place in places([str(rank) for rank in range(world_size)])]
    try:
        return on_ranks(world_size, _with_horovod, by_rank, function, arguments)
    finally:
        server.shutdown()
        server.server_close()


def _with_horovod(
    rank: int,
    world_size: int,
    by_rank: list[dict[str, str]],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    os.environ.update(by_rank[rank])
    import horovod.torch as hvd

    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, world_size)
    try:
        return function(rank, world_size, *arguments)
    finally:
        hvd.shutdown()
