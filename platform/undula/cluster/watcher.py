"""The spot watcher: reads what the cloud tells its machine, and has Ray drain the machine's nodes before they go."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from undula.cluster.notices import Notice, Source, Unreadable
from undula.elastic.ray.gcs import Head
from undula.errors import ClusterError

RETRY_S = 1.0
"""Between attempts to tell Ray."""
HEAD_GONE_S = 15.0
"""A head that does not answer for so long is taken for gone, and the job with it."""


def watch(
    source: Source,
    drain: Callable[[Notice], Sequence[str]],
    tell: Callable[[str], None],
    is_over: Callable[[float], bool],
) -> None:
    """Look for a notice until the end, and pass on the first, or the first with a deadline; a line for each change of state.

    While Ray does not take a notice with a deadline, there is no looking: it would take time that the notice does not have.

    Args:
        source: of notices.
        drain: tells Ray; returns the ids of the nodes that drain, or raises ClusterError where Ray does not take it.
        tell: takes a line.
        is_over: waits for so many seconds, and returns whether the watch is to end.
    """
    state: object = None
    untold, passed_on, pause_s = None, None, 0.0
    while not is_over(pause_s):
        pause_s = source.pause_s
        now, line = state, ""
        if untold is None or not _is_to_come(untold):
            try:
                found = source.poll()
                untold = found if found and _is_news(found, passed_on) else None
                if found is None:
                    now, line = "watching", f"watching {source.name} for notices"
            except Unreadable as error:
                untold, now, line = None, "unreadable", f"cannot read {source.name}: {error}; looking on"
        if notice := untold:
            try:
                nodes = ", ".join(node[:8] for node in drain(notice))
                now, line = ("draining", notice), f"{_in_words(notice)}: Ray drains {nodes}"
                passed_on, untold = notice, None
            except ClusterError as error:
                pause_s, now = RETRY_S, ("untold", notice)
                line = f"{_in_words(notice)}: Ray does not know yet ({error}); trying again"
        if now != state:
            state = now
            tell(line)


def _is_to_come(notice: Notice) -> bool:
    return notice.deadline is not None and notice.deadline > time.time()


def _is_news(notice: Notice, passed_on: Notice | None) -> bool:
    return passed_on is None or (passed_on.deadline is None and notice.deadline is not None)


def _in_words(notice: Notice) -> str:
    if notice.deadline is None:
        return f"{notice.reason}, at a time that is not known"
    return f"{notice.reason} in {max(notice.deadline - time.time(), 0.0):.0f} s"


def drain_here(notice: Notice, address: str, node: str | None) -> list[str]:
    """Have Ray drain this machine's nodes, or one of them; their ids.

    Args:
        notice: that came.
        address: of the cluster's head; `auto` for the cluster that this machine is a node of.
        node: id of the one node that goes, where several clusters' nodes share a machine.

    Raises:
        ClusterError: Ray does not run here, or does not take it.
    """
    head = Head(address, os.environ)
    try:
        nodes = [node] if node else list(head.ask("here"))
        if not nodes:
            raise ClusterError(f"no node of the cluster at {address} is on this machine")
        for each in nodes:
            head.drain(each, notice.deadline)
        return nodes
    finally:
        head.close()


def leave(notice_s: float, address: str, node: str | None, tell: Callable[[str], None]) -> None:
    """Have Ray drain this machine's nodes, and wait until they are gone, or the notice is over, or the head does not answer.

    Args:
        notice_s: seconds until this machine goes.
        address: of the cluster's head.
        node: id of the one node that goes; None for all of this machine.
        tell: takes a line.
    """
    deadline = time.time() + notice_s
    nodes: list[str] = []
    is_told, answered, problem = False, time.time(), ""
    while time.time() < deadline and time.time() - answered < HEAD_GONE_S:
        head = Head(address, os.environ)
        try:
            while time.time() < deadline:
                if not is_told:
                    nodes = [node] if node else list(head.ask("here"))
                    for each in nodes:
                        head.drain(each, deadline)
                    is_told = True
                    tell(f"Ray drains {', '.join(each[:8] for each in nodes) or 'nothing: no node is here'}")
                if not set(nodes) & set(head.ask("alive")):
                    return
                answered = time.time()
                time.sleep(RETRY_S)  # paces the looks
        except ClusterError as error:
            if str(error) != problem:
                problem = str(error)
                tell(f"{problem}; trying again")
            time.sleep(RETRY_S)  # paces the attempts
        finally:
            head.close()


class OrSignal:
    """Another source, or SIGUSR1 to this process, as a notice of `notice_s` seconds."""

    def __init__(self, source: Source, notice_s: float):
        self.name, self.pause_s = source.name, source.pause_s
        self.wake = threading.Event()
        self._source = source
        self._notice_s = notice_s
        self._signalled: Notice | None = None
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._signalled = self._signalled or Notice("SIGUSR1 came", time.time() + self._notice_s)
        self.wake.set()

    def poll(self) -> Notice | None:
        return self._signalled or self._source.poll()

    def wait(self, seconds: float) -> bool:
        """Until a signal comes, or for so long; never the end."""
        self.wake.wait(seconds)
        self.wake.clear()
        return False
