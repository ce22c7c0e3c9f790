"""`undula spot watch` and `undula spot leave`: their options and what they do with them."""

import argparse
import os
from functools import partial
from pathlib import Path

from undula.cluster.notices import SOURCES, Aws, File, Source, source_here
from undula.cluster.watcher import OrSignal, drain_here, leave, watch
from undula.errors import SpecError

SIGNAL_NOTICE_S = 30.0
LONGEST_NOTICE_S = 7 * 86400.0


def add_spot_arguments(parser: argparse.ArgumentParser) -> None:
    text = f"where notices come from: {', '.join(SOURCES)}, or file:PATH (default: the cloud that made this machine)"
    parser.add_argument("--source", metavar="SOURCE", help=text)
    parser.add_argument("--url", help="of the cloud's metadata server, where it is not where the cloud has it")
    text = "leave when AWS recommends it, too: it has no deadline, and may come to nothing"
    parser.add_argument("--rebalance", action="store_true", help=text)
    _add_nodes(parser)
    text = f"seconds of a notice by SIGUSR1 (default: {SIGNAL_NOTICE_S:g})"
    parser.add_argument("--signal-notice", type=_seconds, default=SIGNAL_NOTICE_S, metavar="S", help=text)
    parser.set_defaults(command=_watch)


def add_leave_arguments(parser: argparse.ArgumentParser) -> None:
    _add_nodes(parser)
    text = "seconds until this machine goes; the command ends then, or when its nodes have left"
    parser.add_argument(
        "--notice", type=_seconds, default=SIGNAL_NOTICE_S, metavar="S", help=f"{text} (default: %(default)g)"
    )
    parser.set_defaults(command=_leave)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= LONGEST_NOTICE_S:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds up to a week")
    return seconds


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    text = "the Ray cluster's head, HOST:PORT (default: RAY_ADDRESS, or that of the cluster which this machine is a node of)"
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS", "auto"), help=text)
    parser.add_argument("--node", metavar="ID", help="of the Ray node that goes (default: all of this machine)")


def _watch(options: argparse.Namespace) -> int:
    source = OrSignal(_source(options.source, options.url, options.rebalance), options.signal_notice)
    drain = partial(drain_here, address=options.address, node=options.node)
    watch(source, drain, partial(print, flush=True), source.wait)
    return 0


def _leave(options: argparse.Namespace) -> int:
    leave(options.notice, options.address, options.node, partial(print, flush=True))
    return 0


def _source(name: str | None, url: str | None, with_rebalance: bool) -> Source:
    """What the options ask for.

    Raises:
        SpecError: there is no such source.
        ClusterError: this machine belongs to no cloud that is known, and no source is given.
    """
    if name is None:
        return source_here(with_rebalance=with_rebalance)
    if name.startswith("file:"):
        return File(Path(name.removeprefix("file:")))
    if name not in SOURCES:
        raise SpecError(f"command line: --source is {name}: give {', '.join(SOURCES)} or file:PATH")
    where = {"url": url.rstrip("/")} if url else {}
    return Aws(with_rebalance=with_rebalance, **where) if name == "aws" else SOURCES[name](**where)
