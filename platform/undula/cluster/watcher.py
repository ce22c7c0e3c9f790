"""Spot watcher, which reads the notices of its machine and asks Ray to drain the machine's nodes before they end."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence

from undula.cluster.notices import Notice, Source, Unreadable
from undula.elastic.ray.gcs import Head, own_addresses
from undula.errors import ClusterError

RETRY_S = 1.0
"""Time in seconds between attempts to reach Ray."""
NODE_ID = re.compile("[0-9a-f]+")
"""Pattern of the id of a node, which an address does not match."""
HEAD_GONE_S = 15.0
"""Time in seconds without an answer after which the head and its jobs count as lost."""


def watch(
    source: Source,
    drain: Callable[[Notice], Sequence[str]],
    log: Callable[[str], None],
    is_over: Callable[[float], bool],
) -> None:
    """Poll a source for notices until the watch ends, and pass the first notice on to Ray.

    If that notice has no deadline, the first notice with a deadline is passed on as well. Each change of state is logged once. As long as
    Ray has not accepted a notice with a future deadline, the source is not polled, because a poll would take part of the remaining time.

    Args:
        source: Source of notices.
        drain: Function that asks Ray to drain nodes and returns their ids, or raises ClusterError if Ray does not accept the request.
        log: Function that shows a line.
        is_over: Function that waits for a number of seconds and returns whether the watch ends.
    """
    state: object = None
    pending, accepted, pause_s = None, None, 0.0
    while not is_over(pause_s):
        pause_s = source.pause_s
        now, line = state, ""
        if pending is None or not _lies_ahead(pending):
            try:
                polled = source.poll()
                pending = polled if polled and _is_new(polled, accepted) else None
                if polled is None:
                    now, line = "watching", f"watching {source.name} for notices"
            except Unreadable as error:
                pending, now, line = None, "unreadable", f"cannot read {source.name}: {error}; trying again"
        if notice := pending:
            try:
                nodes = ", ".join(node[:8] for node in drain(notice))
                now, line = ("draining", notice), f"{_description(notice)}: Ray drains {nodes}"
                accepted, pending = notice, None
            except ClusterError as error:
                pause_s, now = RETRY_S, ("pending", notice)
                line = f"{_description(notice)}: Ray has not accepted the notice yet ({error}); trying again"
        if now != state:
            state = now
            log(line)


def _lies_ahead(notice: Notice) -> bool:
    return notice.deadline is not None and notice.deadline > time.time()


def _is_new(notice: Notice, accepted: Notice | None) -> bool:
    return accepted is None or (accepted.deadline is None and notice.deadline is not None)


def _description(notice: Notice) -> str:
    if notice.deadline is None:
        return f"{notice.reason}, at an unknown time"
    return f"{notice.reason} in {max(notice.deadline - time.time(), 0.0):.0f} s"


def drain_here(notice: Notice, address: str, node: str | None) -> list[str]:
    """Ask Ray to drain this machine's nodes, or one of them, and return their ids.

    Args:
        notice: Notice to pass on.
        address: Address of the cluster's head; `auto` for the cluster that this machine is a node of.
        node: Id or address of the only node to drain; None for all nodes of this machine.

    Raises:
        ClusterError: Ray does not run on this machine, or does not accept the request.
    """
    head = Head(address, os.environ)
    try:
        nodes = nodes_to_drain(head, node)
        if not nodes:
            raise ClusterError(no_node(head, node))
        for id in nodes:
            head.drain(id, notice.deadline)
        return nodes
    finally:
        head.close()


def nodes_to_drain(head: Head, node: str | None) -> list[str]:
    """Return the ids of the nodes to drain: those of this machine, or, if `node` is given, those with this id or address."""
    if not node:
        return list(head.ask("here"))
    if NODE_ID.fullmatch(node):
        return [node]
    return [id for id, address in head.ask("addresses").items() if address == node]


def no_node(head: Head, node: str | None) -> str:
    """Return the sentence that says why there is no node to drain."""
    known = ", ".join(sorted(set(head.ask("addresses").values()))) or "none"
    sought = f"has the address {node}" if node else f"is on this machine ({', '.join(sorted(own_addresses()))})"
    return f"no node of the cluster {sought}; the addresses of its nodes are {known}: name one with --node"


def leave(notice_s: float, address: str, node: str | None, log: Callable[[str], None]) -> None:
    """Ask Ray to drain this machine's nodes, and wait until they have ended, the notice is over or the head stops answering.

    Args:
        notice_s: Time in seconds until this machine ends.
        address: Address of the cluster's head.
        node: Id or address of the only node to drain; None for all nodes of this machine.
        log: Function that shows a line.

    Raises:
        ClusterError: Ray has not accepted the request.
    """
    deadline = time.time() + notice_s
    nodes: list[str] = []
    is_accepted, answered, problem = False, time.time(), ""
    while time.time() < deadline and time.time() - answered < HEAD_GONE_S:
        head = Head(address, os.environ)
        try:
            while time.time() < deadline:
                if not is_accepted:
                    nodes = nodes_to_drain(head, node)
                    for id in nodes:
                        head.drain(id, deadline)
                    is_accepted = bool(nodes)
                    if not nodes:
                        problem, deadline = no_node(head, node), 0.0
                        break
                    log(f"Ray drains {', '.join(id[:8] for id in nodes)}")
                if not set(nodes) & set(head.ask("alive")):
                    return
                answered = time.time()
                time.sleep(RETRY_S)
        except ClusterError as error:
            if str(error) != problem:
                problem = str(error)
                log(f"{problem}; trying again")
            time.sleep(RETRY_S)  # limits the rate of attempts
        finally:
            head.close()
    if not is_accepted:
        raise ClusterError(
            f"the cluster at {address} has not accepted that this machine leaves, so its loss will be a crash: "
            f"{problem or 'the notice was too short for an answer'}"
        )


class SourceOrSignal:
    """Source that also takes a SIGUSR1 to this process as a notice of `notice_s` seconds."""

    def __init__(self, source: Source, notice_s: float):
        self.name, self.pause_s = source.name, source.pause_s
        self.wake = threading.Event()
        self._source = source
        self._notice_s = notice_s
        self._signalled: Notice | None = None
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._signalled = self._signalled or Notice("SIGUSR1 announces a preemption", time.time() + self._notice_s)
        self.wake.set()

    def poll(self) -> Notice | None:
        """Return the notice of the signal or of the other source, if any."""
        return self._signalled or self._source.poll()

    def wait(self, seconds: float) -> bool:
        """Wait for a signal, at most `seconds`. Return False, because a signal does not end the watch."""
        self.wake.wait(seconds)
        self.wake.clear()
        return False
