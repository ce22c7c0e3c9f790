"""Smoke test of a job: everything that a run does, once and at full size on one worker, before the run itself is started.

The test is a run of its own below the job's `runs`, and is deleted at its end. It has the plan of the job, of which it makes three steps.
"""

import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from secrets import token_hex
from typing import Any, TypeVar

from ray.exceptions import RayError
from ray.train import TrainingFailedError

from undula.cluster.prices import load_prices
from undula.config.job import LoadedSpec
from undula.driver.connection import connected, for_workers
from undula.driver.launch import launch
from undula.driver.preflight import Prepared, on_machines, prepare
from undula.driver.record import record_job
from undula.driver.smoke_figures import Measured, summary
from undula.driver.training import TrainFunction
from undula.elastic.ray.capacity import alive_nodes
from undula.elastic.ray.cluster_gpus import offers_gpus
from undula.elastic.ray.failures import refusal_of, whole_story
from undula.elastic.ray.failures import summary as in_short
from undula.errors import FAILED, StorageError, UndulaError, end_on_sigterm, one_line
from undula.plan.fleet import FleetSpec
from undula.state.commit import COMMIT, find_commits
from undula.state.directory import held
from undula.state.events import (
    CheckpointEvent,
    Event,
    GroupEvent,
    MemoryEvent,
    StartEvent,
    StorageEvent,
    ValidationEvent,
    WaitingEvent,
    WarningEvent,
    WorkerPlace,
)
from undula.state.export import export_weights
from undula.state.figures import LOGGED, OWN_STATE, Figures, figures_of, other_figures
from undula.state.ledger import read_ledger
from undula.state.optimizer_state import FITS
from undula.state.records import PARTS
from undula.state.spec import lack_of_room, size
from undula.storage import Store, open_store
from undula.telemetry.hub import HubFollower, start_hub
from undula.telemetry.live import message_lines
from undula.telemetry.messages import Line, Message

E = TypeVar("E", bound=Event)

STEPS = 3
"""Number of steps of the smoke test. The first one also allocates memory, the second one shows how long a step takes, and the third one
follows a checkpoint, so that other groups can make it again."""
TOLERANCE = 1e-4
"""Relative difference of a number of a step that is made again, where the job does not have the same bits each time."""
OWN_BATCH = (
    "compute the loss of a batch from its samples and the model alone, not from the rank, from the number of workers or batches, or from "
    "what earlier batches have changed"
)
"""Fix of a script whose losses depend on the number of workers."""
OWN_SETTINGS = (
    "all groups of the test have the same job, so this depends on the workers or the time; derive what the script gives to the run from "
    "run.plan, run.virtual_workers or run.config"
)
"""Fix of a script whose settings depend on the number of workers."""
PATIENCE = 1_000_000
"""Number of validations without an improvement after which the smoke test would stop early."""
FOLLOW_S = 0.2
"""Seconds between two reads of the workers' messages."""
EXPORT = "export"
"""Folder of the exported weights in the run directory of the test."""
SHOWN = (Line, WarningEvent, WaitingEvent, StorageEvent)
"""Messages that are shown beside the lines of the parts."""
SAID = "settings_taken", "repeated_steps_differ"
"""Warnings in whose place the test says what is wrong."""
FRAMES = {
    "validate": r'undula/(train/validation|adapters/evaluation)\.py|undula/adapters/transformers/trainer\.py", line \d+, in evaluate',
    "checkpoint": r"undula/train/saver\.py|undula/state/checkpoint",
    "read": r"undula/data/|undula/train/(samples|device_batches|micro_batches)\.py",
}
"""Parts by patterns of the files of which one is in the traceback of a failure."""
MEMORY = re.compile(r"out of memory|memory ran out")
FIX_OF_MEMORY = "lower plan.micro_batch, set activations.keep=none, or use nodes with more memory"
FIXES = {
    "start": "correct what the script does before its first step",
    "validate": "correct the validation of the script",
    "read": "correct the data, or what the script does to read a sample",
    "step": "correct what the script does in a step",
    "checkpoint": "make room or get write permission there, or set another folder with runs",
    "restore": "correct what the script does before its first step, or what it gives to run.state()",
    "export": "correct the model, or load its weights with undula.load_weights",
    "2 workers": "correct the script, or set workers.max=1",
}
"""What a user can do about a failure, by part."""


class SmokeError(UndulaError):
    """A part of a smoke test failed: the job would fail there, too."""

    status = FAILED


def smoke_job(loaded: LoadedSpec, train: TrainFunction) -> None:
    """Go through all parts of a run of a job, and print how long each takes and what the whole run will take.

    Args:
        loaded: The job.
        train: Train function of the script.

    Raises:
        UndulaError: A part failed. The message begins with the name of the part.
        SystemExit: The driver was stopped.
    """
    began, tested = time.monotonic(), _as_test(loaded)
    store = open_store(tested.spec.run_url)
    print(f"smoke test in {store.url}, which is deleted at its end", flush=True)
    with _temporary(store):
        with _part("checkpoint", f"{loaded.origin('runs')}: runs: ", f"; {FIXES['checkpoint']}"):
            store.check_writable()
        with _part("check"):
            prepared = prepare(tested, train, fresh=True)
        _print("check", time.monotonic() - began, "settings, data, model and trackers")
        with held(store), connected():
            end_on_sigterm()  # Ray has replaced the handler when it connected
            with _part("start"):
                tested = on_machines(tested, offers_gpus)
            test = SmokeTest(tested, prepared, for_workers(train), start_hub(store))
            measured = test.run()
    took_s = time.monotonic() - began
    print("\n".join(summary(took_s, measured, loaded.spec, prepared.plan, load_prices())), flush=True)


def _as_test(loaded: LoadedSpec) -> LoadedSpec:
    """Return a job with the settings of its smoke test, which leave its model, batches, data and plan as they are.

    Checkpoints are the only state that the next group can find, and the first failure is the last one.
    """
    spec = loaded.spec
    tested = replace(
        spec,
        name=f"{spec.name}-smoke-{token_hex(4)}",
        checkpoint=replace(spec.checkpoint, keep=max(spec.checkpoint.keep, 2), snapshot_every_steps=0),
        stop=replace(spec.stop, patience=PATIENCE) if spec.stop else None,
        workers=replace(spec.workers, min=1, max_failures=0, fleet=FleetSpec(), grow="never"),
    )
    return replace(loaded, spec=tested)


@contextmanager
def _temporary(store: Store) -> Iterator[None]:
    """Delete a run directory at the end of a block."""
    try:
        yield
    except BaseException:
        with suppress(StorageError):  # which may be the error itself
            store.delete("")
        raise
    store.delete("")


@contextmanager
def _part(name: str, before: str = "", after: str = "") -> Iterator[None]:
    """Add the name of a part, and further text, to an error for the user."""
    try:
        yield
    except UndulaError as error:
        raise type(error)(f"{name}: {before}{error}{after}") from error


def _print(part: str, seconds: float | None, note: str) -> None:
    """Print the line of a part. None stands for a part that was not tried."""
    print(
        f"  {part:<11} {'–':>6}    {note}" if seconds is None else f"  {part:<11} {seconds:6.1f} s  {note}", flush=True
    )


@dataclass
class SmokeTest:
    """The parts of a smoke test that need a cluster.

    Args:
        loaded: The job with the settings of the test, and with numbers in place of what depends on the machines.
        prepared: The job as the driver has checked it.
        train: Train function, as workers get it.
        hub: Handle of the actor that receives the messages of the workers.
    """

    loaded: LoadedSpec
    prepared: Prepared
    train: TrainFunction
    hub: Any
    events: list[Event] = field(default_factory=list)
    """Events of the newest group."""
    position: int = 0
    """Number of messages of the hub that were shown."""

    @property
    def store(self) -> Store:
        return self.prepared.store

    @property
    def last(self) -> int:
        """Number of steps of the test."""
        return min(STEPS, self.prepared.plan.total_steps)

    def run(self) -> Measured:
        """Go through the parts, and return what was measured.

        Raises:
            UndulaError: A part failed.
        """
        has_room = self._has_room_for_two()  # which a group would take for a moment after its end
        measured = self._measured(self._train("start", 1))
        self._refuse_full_disk(measured.checkpoint_bytes)
        figures, again = figures_of(self.store), min(self.last - 1, 1)
        if again:
            self._delete_last_checkpoint()
        self._train("restore", 1)
        self._require_restored("restore", self.last - again)
        tolerance = 0.0 if self.loaded.spec.has_same_bits(measured.device_bytes is not None) else TOLERANCE
        varying = self._require_same("restore", figures, "a run that a new worker has resumed", OWN_STATE, tolerance)
        if varying:
            print(
                f"  logged in step {self.last} with other numbers: {', '.join(varying)}; unless they are times, {OWN_STATE}"
            )
        weights = self._export(EXPORT)
        if self.loaded.spec.workers.max == 1:
            _print("2 workers", None, "not tried, because workers.max is 1")
        elif not has_room:
            _print("2 workers", None, "not tried, because the cluster has room for one worker now")
        else:
            self._delete_last_checkpoint()
            self._try_two_workers(measured.workers[0], tolerance, varying, weights)
        return measured

    def _try_two_workers(
        self, alone: WorkerPlace, tolerance: float, varying: Collection[str], weights: Collection[bytes]
    ) -> None:
        """Make the last step again with two workers, and compare what it reports.

        Args:
            alone: Worker that has made it alone.
            tolerance: Relative difference up to which numbers of workers on equal machines count as equal.
            varying: Logged numbers that differ from group to group.
            weights: Digests of the files of its weights.

        Raises:
            UndulaError: Training failed, or a loss, a validation or the weights differ.
        """
        figures, before, began = figures_of(self.store), self._steps()[-1], time.monotonic()
        self._train("2 workers", 2)
        self._require_restored("2 workers", self.last - 1)
        after, took_s = self._steps()[-1], time.monotonic() - began
        note = f"step {self.last} again, loss {after['loss']:.6g}; on one worker {before['loss']:.6g}"
        if after["step_samples"] == before["step_samples"]:  # with an elastic batch, two workers have more of them
            if not all(_are_alike(alone, each) for each in self._events(GroupEvent)[0].workers):
                tolerance = max(tolerance, TOLERANCE)
            others = self._require_same("2 workers", figures, "a run on two workers", OWN_BATCH, tolerance)
            if tolerance == 0.0 and self._export(f"{EXPORT}-2") != weights:
                raise SmokeError(
                    f"2 workers: the weights after {self.last} steps are not those of one worker, although the losses are: the script "
                    "changes gradients or weights in a way that depends on the rank or the number of workers, as with "
                    "weight.to_local(); make the change that one worker makes, on all of them"
                )
            if names := [name for name in others if name not in varying]:
                note += f"; logged with other numbers: {', '.join(names)}"
        _print("2 workers", took_s, note)

    def _has_room_for_two(self) -> bool:
        nodes = alive_nodes(self.loaded.spec.workers.per_worker).values()
        return sum(node.free for node in nodes if node.deadline is None) >= 2

    def _train(self, part: str, num_workers: int) -> float:
        """Train with new workers until the test has made its steps, and return the seconds until they had their state.

        Raises:
            UndulaError: Training failed.
        """
        loaded = self.loaded.with_workers(replace(self.loaded.spec.workers, min=num_workers, max=num_workers))
        spec = record_job(loaded, self.prepared.plan, self.store, self.prepared.script_data)
        checkpoint = replace(spec.job.checkpoint, every_steps=max(self.last - 1, 1))
        spec = replace(spec, job=replace(spec.job, ends_after=STEPS, checkpoint=checkpoint))
        began = time.time()
        self.events = []
        failure: Exception | None = None
        with HubFollower(self.hub, partial(self._show, part, began), FOLLOW_S, self.position) as follower:
            try:
                launch(self.train, spec, self.store, self.hub)
            except (TrainingFailedError, RayError) as error:  # Ray may also end the controller if memory runs out
                failure = error
        self.position = follower.position
        if failure:
            raise self._error(part, failure)
        for event in self._events(WarningEvent):
            if event.code == "settings_taken":
                raise SmokeError(
                    f"{part}: the script gives other settings than to the first group: {event.detail}; {OWN_SETTINGS}"
                )
        return self._events(StartEvent)[0].time - began

    def _show(self, part: str, began: float, messages: Sequence[Message]) -> None:
        """Show the messages of a group, and the lines of the parts that have ended."""
        for message in messages:
            if isinstance(message, Event):
                self.events.append(message)
            if isinstance(message, StartEvent) and part == "start":
                _print(part, message.time - began, "a worker, the script and its model")
            elif isinstance(message, StartEvent) and part == "restore":
                does = f"which makes step {self.last} again" if message.step < self.last else "which was the last"
                _print(part, message.time - began, f"a new worker, with the state after step {message.step}, {does}")
            elif isinstance(message, ValidationEvent) and part == "start" and message.step == 0:
                _print("validate", self._validation_s(message), message.message)
            elif isinstance(message, CheckpointEvent) and part == "start" and len(self._events(CheckpointEvent)) == 1:
                rows = self._steps()[:2]  # the ledger has the steps that a checkpoint has
                _print("read", rows[0]["data_s"], f"the {rows[0]['step_samples']:,} samples of the first step")
                _print("step", _seconds(rows[-1]), f"step {len(rows)}, with a loss of {rows[-1]['loss']:.4g}")
                _print("checkpoint", message.seconds, size(find_commits(self.store)[0][0].bytes))
        shown = [message for message in messages if isinstance(message, SHOWN)]
        for line in message_lines([each for each in shown if getattr(each, "code", "") not in SAID]):
            print(line, flush=True)

    def _measured(self, start_s: float) -> Measured:
        """Return what the first group has measured."""
        steps = self._steps()
        second = steps[:2][-1]
        validations = self._events(ValidationEvent)
        if not validations:
            _print("validate", None, "not tried, because the script does not validate so early")
        elif all(validation.step for validation in validations):
            _print("validate", self._validation_s(validations[-1]), validations[-1].message)
        memory = self._events(MemoryEvent)
        return Measured(
            start_s=start_s,
            first_step_s=_seconds(steps[0]),
            step_s=_seconds(second),
            step_samples=second["step_samples"],
            validation_s=self._validation_s(validations[-1]) if validations else None,
            has_interval=any(validation.step == 0 for validation in validations),
            checkpoint_s=self._events(CheckpointEvent)[-1].seconds,
            blocked_s=steps[-1]["blocked_s"],
            checkpoint_bytes=find_commits(self.store)[0][0].bytes,
            host_bytes=memory[0].host_bytes if memory else None,
            device_bytes=memory[0].allocated_bytes if memory else None,
            workers=self._events(GroupEvent)[0].workers,
        )

    def _validation_s(self, validation: ValidationEvent) -> float:
        """Return the seconds from the start of the group, or else from the step before, to the end of a validation."""
        ends = {row["step"] + row["merged_steps"]: row["time"] for row in self._steps()} if validation.step else {}
        began = self._events(StartEvent)[0].time
        return max(validation.time - float(ends.get(validation.step, began)), 0.0)

    def _refuse_full_disk(self, checkpoint_bytes: int) -> None:
        """Refuse a run whose checkpoints do not fit into the folder of the runs. It will not find those of the test there."""
        spec, present = self.loaded.spec, len(find_commits(self.store)[0])
        free_bytes = self.store.free_bytes + present * checkpoint_bytes
        if problem := lack_of_room(spec.checkpoint, spec.runs, checkpoint_bytes, free_bytes):
            raise StorageError(f"checkpoint: {problem}")

    def _require_restored(self, part: str, step: int) -> None:
        """Check that the newest group began with the checkpoint of a step.

        Raises:
            SmokeError: It did not.
        """
        start = self._events(StartEvent)[0]
        if start.step != step:
            skipped = [event.detail for event in self._events(WarningEvent) if event.code == "checkpoint_skipped"]
            reason = skipped[0] if skipped else f"it began with {start.origin or 'no state'}"
            raise SmokeError(
                f"{part}: a new group went on after step {start.step} and not after step {step}: {reason}; {FIXES['checkpoint']}"
            )

    def _require_same(self, part: str, figures: Figures, run: str, fix: str, tolerance: float) -> list[str]:
        """Compare what the newest group has reported of the steps that it has made again, and return the logged numbers that differ.

        Args:
            part: Name of the part.
            figures: Numbers of before.
            run: Description of the newest group's run.
            fix: What the script should do if a number differs.
            tolerance: Relative difference up to which numbers count as equal.

        Raises:
            SmokeError: A loss or a validation differs.
        """
        gaps = other_figures(figures_of(self.store), figures, run, tolerance)
        for (_, name), gap in gaps.items():
            if not name.endswith(LOGGED):
                raise SmokeError(f"{part}: {gap}; {fix}")
        return list(dict.fromkeys(name.removesuffix(f", {LOGGED}") for _, name in gaps))

    def _export(self, folder: str) -> list[bytes]:
        """Export the weights, and return the digest of each file."""
        began, out = time.monotonic(), self.store / folder
        try:
            exported = export_weights(self.store, out)
        except UndulaError as error:
            raise type(error)(f"export: {error}") from error
        except Exception as error:
            raise SmokeError(f"export: {type(error).__name__}: {one_line(error)}; {FIXES['export']}") from error
        if folder == EXPORT:
            _print("export", time.monotonic() - began, f"{size(exported.bytes)} of weights")
        return [blake2b(out.read(name)).digest() for name in exported.files]

    def _delete_last_checkpoint(self) -> None:
        """Delete the checkpoint of the last step, so that the next group has a step to make."""
        for commit in find_commits(self.store)[0]:
            if commit.step >= self.last:
                self.store.delete(f"{commit.folder}/{COMMIT}")  # first, so that no reader uses what remains
                self.store.delete(commit.folder)

    def _error(self, part: str, failure: Exception) -> UndulaError:
        """Return the error for the user with which the newest group has failed, after printing the traceback of the script."""
        refusal, story = refusal_of(failure), whole_story(failure)
        name = self._failed_part(story) if part == "start" else part
        if refusal:
            return type(refusal)(f"{name}: {str(refusal).replace(FITS, OWN_SETTINGS)}")
        if isinstance(failure, TrainingFailedError) and "Traceback" in story:
            print(story, file=sys.stderr, flush=True)
        cause = in_short(failure).removeprefix("rank 0: ").rstrip(".")
        return SmokeError(f"{name}: {cause}; {FIX_OF_MEMORY if MEMORY.search(cause) else FIXES[name]}")

    def _failed_part(self, story: str) -> str:
        """Return the part in which the first group has failed: that of the traceback, or else the one that came next."""
        for name, files in FRAMES.items():
            if re.search(rf'File "[^"]*(?:{files})', story):
                return name
        if not self._events(StartEvent):
            return "start"
        data = self.prepared.script_data
        validates = data.validation is not None if data else self.loaded.spec.data.validation is not None
        warned = any(event.code == "no_validation" for event in self._events(WarningEvent))
        return "validate" if validates and not warned and not self._events(ValidationEvent) else "step"

    def _events(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def _steps(self) -> list[dict[str, Any]]:
        """Return the steps of the run so far, as rows of the ledger."""
        return list(read_ledger(self.store).steps.to_pylist())


def _are_alike(worker: WorkerPlace, other: WorkerPlace) -> bool:
    """Return whether two workers run on one node, or on two machines of one kind, so that they compute the same bits."""
    return any(worker.get(key) == other.get(key) is not None for key in ("node", "machine"))


def _seconds(row: dict[str, Any]) -> float:
    """Return the duration of a step."""
    return float(sum(row[name] or 0.0 for name in PARTS))
