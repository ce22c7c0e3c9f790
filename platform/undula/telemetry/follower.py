"""Follower of a ledger: a thread of the driver that sends the steps of a run to a tracker.

The ledger is the buffer. While a tracker is out of reach, the thread holds no steps. Once it is back, the thread asks it for the newest
step that it has, and reads on from there.
"""

import threading
import time
from collections.abc import Callable, Mapping

import pyarrow as pa

from undula.errors import StorageError
from undula.state.events import EndEvent, FailEvent, StartEvent, StopEvent
from undula.storage import Store
from undula.telemetry.feed import Feed
from undula.telemetry.tracker import RunState, TaggedTracker, TrackedRun, Tracker

INTERVAL_S = 5.0
"""Seconds between two reads of the ledger."""
MOST_INTERVAL_S = 60.0
"""Maximum time in seconds between two attempts to reach a tracker. Each failed attempt doubles the time."""
LAST_INTERVAL_S = 1.0
"""Seconds between two attempts to reach a tracker at the end of training."""
DESCRIBE_INTERVAL_S = 300.0
"""Seconds between two updates of a run's tags. Its cost follows from the whole ledger, which is read for this."""


class Follower:
    """Sends the steps of a run to a tracker until training ends.

    Args:
        tracker: The tracker.
        run: Callback that returns the run as the tracker shows it.
        store: Run directory.
        describe: Callback that returns the tags of the run, given the rows of its events.
        report: Callback that gets the follower when its tracker gets out of reach during training, and when it has caught up.
        interval_s: Seconds between two reads of the ledger.
    """

    def __init__(
        self,
        tracker: Tracker,
        run: Callable[[], TrackedRun],
        store: Store,
        describe: Callable[[pa.Table], Mapping[str, str]],
        report: Callable[["Follower"], None],
        interval_s: float = INTERVAL_S,
    ):
        self._tracker, self._run, self._store = tracker, run, store
        self._describe, self._report, self._interval_s = describe, report, interval_s
        self._feed: Feed | None = None
        """Steps that the tracker lacks; None while it is out of reach."""
        self._described_at = float("-inf")
        self.name = tracker.name
        """Name of the tracker."""
        self.problem: BaseException | None = None
        """Error with which the tracker is out of reach; None if it is not."""
        self.newest: int | None = None
        """Number of the newest step that the tracker has; None if it was out of reach so far."""
        self._is_over, self._has_given_up = threading.Event(), threading.Event()
        self._is_complete = False
        self._thread = threading.Thread(target=self._follow, name=f"undula-tracker-{tracker.name}", daemon=True)

    def start(self) -> None:
        """Begin to follow the ledger."""
        self._thread.start()

    def end_training(self) -> None:
        """Tell the thread that the ledger is complete, so that it sends the rest. This does not wait for it."""
        self._is_over.set()

    def wait(self, limit_s: float) -> bool:
        """Wait until everything was sent after the end of training, up to a time limit, and return whether it was."""
        self._thread.join(limit_s)
        self._has_given_up.set()
        return self._is_complete

    def _follow(self) -> None:
        pause_s = self._interval_s
        while True:
            is_over = self._is_over.is_set()
            self._try_to_catch_up(is_over)
            if self._is_complete or (is_over and self._has_given_up.wait(LAST_INTERVAL_S)):
                return
            pause_s = min(2 * pause_s, MOST_INTERVAL_S) if self.problem else self._interval_s
            self._is_over.wait(pause_s)

    def _try_to_catch_up(self, is_over: bool) -> None:
        """Send what the tracker lacks, and report when the tracker gets out of reach and when it is back."""
        was_out_of_reach = self.problem is not None
        try:
            if self._catch_up(is_over):
                self.problem, self._is_complete = None, is_over
        except Exception as error:
            self.problem, self._feed = error, None
        if was_out_of_reach != (self.problem is not None) and not is_over:
            self._report(self)

    def _catch_up(self, is_over: bool) -> bool:
        """Send what the tracker lacks. Returns False if the ledger cannot be read, for which the store has an event of its own."""
        feed = self._feed = self._feed or Feed(self._store, self._tracker.open(self._run()))
        self.newest = max(feed.newest, 0)
        try:
            feed.read()
        except StorageError:
            return False
        while steps := feed.due(is_over):
            self._tracker.send(steps)
            feed.sent(steps)
            self.newest = feed.newest
        if isinstance(self._tracker, TaggedTracker) and (
            is_over or time.monotonic() - self._described_at >= DESCRIBE_INTERVAL_S
        ):
            self._tracker.describe(self._describe(feed.events))
            self._described_at = time.monotonic()
        if is_over:
            self._tracker.close(run_state(feed.events))
        return True


def run_state(events: pa.Table) -> RunState:
    """Return how training ended, given the rows of a run's events in the order of time."""
    states: dict[str, RunState] = {
        StartEvent.KIND: "failed",
        FailEvent.KIND: "failed",
        StopEvent.KIND: "stopped",
        EndEvent.KIND: "finished",
    }
    known = [states[kind] for kind in events["kind"].to_pylist() if kind in states]
    return known[-1] if known else "failed"
