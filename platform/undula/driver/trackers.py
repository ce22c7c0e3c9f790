"""Trackers of a job: their checks before any worker starts, what they show of a run beside its steps, and their threads while it trains."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from textwrap import shorten
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from undula import extensions
from undula.config.job import LOGICAL, LoadedSpec
from undula.config.yaml_file import flatten
from undula.errors import SpecError
from undula.masking.values import mask
from undula.state.directory import JOB_FILE
from undula.state.events import (
    CheckpointEvent,
    Event,
    LossEvent,
    SnapshotEvent,
    TrackerEvent,
    ValidationEvent,
)
from undula.state.ledger import decode_events
from undula.storage import Store
from undula.telemetry.follower import Follower
from undula.telemetry.registry import configured_trackers, standing_trackers
from undula.telemetry.tracker import TrackedRun, Tracker

END_LIMIT_S, STOP_LIMIT_S = 30.0, 2.0
"""Maximum time in seconds to wait for trackers at the end of training, and when the job is stopped: Ray kills it after 3 s."""
ROUTINE = {event.KIND for event in (CheckpointEvent, SnapshotEvent, ValidationEvent, LossEvent)}
"""Kinds of events that happen all the time. Trackers get their numbers, and the messages of the others."""
TAGS = "undula.tags"
"""Group of the entry points by which packages add tags: functions that return some, given the run directory."""
OWN_TAGS = {"cost": "undula.cluster.cost_tag:cost_tag"}
NEWEST_EVENTS = 20
"""Number of events whose messages trackers show."""


def checked_trackers(loaded: LoadedSpec, store: Store) -> tuple[Tracker, ...]:
    """Return the trackers of a job, after checking that each is installed and has what it needs. A server may be out of reach.

    Raises:
        SpecError: An extra of the package, a setting or credentials are missing.
    """
    configured = configured_trackers(loaded.spec.trackers, store)
    for name, tracker in configured.items():
        key = f"trackers.{name}"
        try:
            tracker.check()
        except SpecError as error:
            setting = str(error).partition(" ")[0].rstrip(":")  # the message may begin with a key of the tracker's
            origin = loaded.origins.get(f"{key}.{setting}") or loaded.origin(key)
            raise SpecError(f"{origin}: {key}: {error}") from error
    return (*configured.values(), *standing_trackers(store))


class Tracking:
    """Context manager in which threads send the steps of a run to trackers. At its end, it waits for them for a limited time.

    Args:
        trackers: Trackers of the run.
        store: Run directory, which has the record of the job.
        publish: Callback for events: trackers that get out of reach, and that are back.
    """

    def __init__(self, trackers: Sequence[Tracker], store: Store, publish: Callable[[Event], None]):
        def record() -> dict[str, Any]:
            return dict(json.loads(store.read(JOB_FILE)))

        def report(follower: Follower) -> None:
            problem = problem_of(follower.problem) if follower.problem else ""
            publish(TrackerEvent(follower.name, follower.newest, problem))

        self._followers = [
            Follower(
                tracker,
                lambda: tracked_run(record(), store),
                store,
                lambda events: tags_of(record(), store, events),
                report,
            )
            for tracker in trackers
        ]
        self.unsent: list[str] = []
        """Sentences on the steps that were not sent within the time limit, after the end of the block."""

    def __enter__(self) -> "Tracking":
        for follower in self._followers:
            follower.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for follower in self._followers:
            follower.end_training()
        deadline = time.monotonic() + (END_LIMIT_S if kind is None else STOP_LIMIT_S)
        late = [follower for follower in self._followers if not follower.wait(max(deadline - time.monotonic(), 0.0))]
        self.unsent = [unsent_steps(follower) for follower in late]


def send_rest(trackers: Sequence[Tracker], store: Store) -> list[str]:
    """Send to trackers what they lack of a run that is not training, and return a sentence for each that lacks something still."""
    with Tracking(trackers, store, lambda event: None) as tracking:
        pass
    return tracking.unsent


def tracked_run(record: Mapping[str, Any], store: Store) -> TrackedRun:
    """Return a run as trackers show it, given its record in job.json, which has no secrets."""
    logical = {key: value for key, value in flatten(record["spec"]) if key.startswith(LOGICAL)}
    facts = {
        key: record[key] for key in ("manifest_digest", "total_steps", "total_samples", "train_rows") if key in record
    }
    parameters = {key: _text(value) for key, value in {**logical, **facts}.items()}
    return TrackedRun(record["id"], record["name"], store.url, record["began"], parameters)


def tags_of(record: Mapping[str, Any], store: Store, events: pa.Table) -> dict[str, str]:
    """Return the tags of a run: settings that may change, the digest of its plan, its events, and what packages add, such as its cost.

    Args:
        record: The run's record in job.json.
        store: Run directory.
        events: Rows of the run's events.
    """
    makers = [extensions.load(TAGS, OWN_TAGS, name) for name in extensions.names(TAGS, OWN_TAGS)]
    further = {key: value for tags_from in makers for key, value in tags_from(store).items()}
    counts = Counter(events["kind"].to_pylist())
    routine = pa.array([kind in ROUTINE for kind in events["kind"].to_pylist()], pa.bool_())
    newest = events.filter(pc.invert(routine)).sort_by("time")[-NEWEST_EVENTS:]
    messages = [_shown(event) for event in decode_events(newest)]
    settings = {key: value for key, value in flatten(record["spec"]) if not key.startswith(LOGICAL)}
    return {
        **{f"job.{key}": _text(value) for key, value in settings.items()},
        "undula.run_directory": store.url,
        "undula.plan_digest": _text(record["plan_digest"]),
        **{f"undula.events.{kind}": str(count) for kind, count in counts.items()},
        "undula.events": "\n".join(messages),
        **further,
    }


def problem_of(error: BaseException) -> str:
    """Return an error as text in one line, without secrets."""
    text = shorten(mask(str(error)), 300, placeholder=" ...")
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def unsent_steps(follower: Follower) -> str:
    """Return a sentence on a tracker that has not received everything."""
    why = f" ({problem_of(follower.problem)})" if follower.problem else ""
    lacks = "the run's newest steps" if follower.newest is None else f"the run's steps after step {follower.newest}"
    return f"the tracker {follower.name} lacks {lacks}, which could not be sent{why}; submit the job again to send them"


def _shown(event: Event) -> str:
    at = "" if event.step is None else f"step {event.step}: "
    return f"{at}{mask(event.message)}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
