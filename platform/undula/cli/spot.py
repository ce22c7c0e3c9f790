"""Command `undula spot`."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

from undula.cli.options import Commands, FiniteRange, cluster_option

SIGNAL_NOTICE_S = 30.0
"""Default notice in seconds, for a machine whose time of removal is unknown."""
_SECONDS = FiniteRange(min=0, min_open=True, max=7 * 86400)
F = TypeVar("F", bound=Callable[..., Any])


def _node_options(command: F) -> F:
    node = click.option(
        "--node",
        metavar="ID",
        help="Id or IP address of the Ray node to drain.  [default: all nodes of this machine]",
    )
    return cluster_option(node(command))


@click.group(cls=Commands, short_help="Have Ray drain this machine before its cloud removes it.")
def spot() -> None:
    """Have Ray drain this machine, a spot node of a cluster, before its cloud removes it."""


@spot.command(short_help="Drain this machine's nodes when its cloud gives notice.")
@click.option(
    "--source",
    metavar="SOURCE",
    help="Source of notices: aws, gcp, azure, file:PATH, or one that a package adds.  [default: the cloud of this machine]",
)
@click.option("--url", metavar="URL", help="URL of the metadata server, if it is not the cloud's own.")
@click.option(
    "--rebalance",
    is_flag=True,
    help="Also leave when AWS recommends it. A recommendation has no deadline, and AWS may not remove the machine after all.",
)
@_node_options
@click.option(
    "--signal-notice",
    type=_SECONDS,
    default=SIGNAL_NOTICE_S,
    show_default=True,
    metavar="S",
    help="Seconds of notice that SIGUSR1 gives.",
)
def watch(
    source: str | None, url: str | None, rebalance: bool, cluster: str, node: str | None, signal_notice: float
) -> None:
    """Wait for a notice from this machine's cloud, and then have Ray drain the machine's nodes. The command runs until it is stopped."""
    from undula.cluster.notices import source_named
    from undula.cluster.watcher import SourceOrSignal, drain_here
    from undula.cluster.watcher import watch as watch_source

    notices = SourceOrSignal(source_named(source, url, rebalance), signal_notice)
    watch_source(notices, partial(drain_here, address=cluster, node=node), partial(print, flush=True), notices.wait)


@spot.command(short_help="Drain this machine's nodes now, and wait until they have left.")
@_node_options
@click.option(
    "--notice",
    type=_SECONDS,
    default=SIGNAL_NOTICE_S,
    show_default=True,
    metavar="S",
    help="Seconds until this machine is removed. The command ends then, or when the nodes have left.",
)
def leave(cluster: str, node: str | None, notice: float) -> None:
    """Have Ray drain this machine's nodes now, and wait until they have left. The command is meant for a pod's preStop hook.

    If Ray does not accept the request, the command fails with status 3.
    """
    from undula.cluster.watcher import leave as leave_cluster

    leave_cluster(notice, cluster, node, partial(print, flush=True))
