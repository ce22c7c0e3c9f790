"""Runs of `undula bench scaling`: a job trains for some steps on each number of workers, in rounds, perhaps beside another program."""

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM

from undula.cluster.local import cluster_at_hand
from undula.cluster.room import refuse_what_never_fits
from undula.config.job import JobSpec, LoadedSpec, as_overrides, load_spec
from undula.errors import ClusterError, RunError, SpecError
from undula.state.processes import POLL_INTERVAL_S, descendants, end_group, is_alive, send_signal
from undula.storage import Store, open_store

PLACEHOLDERS = ("{workers}", "{steps}", "{global_batch}", "{out}")
"""What a command of another program may contain, and is replaced: numbers, and the path of the file that it writes."""
NEEDED = ("{workers}", "{steps}", "{out}")
"""Placeholders without which its measurements would mean nothing."""
NEVER = 10**9
"""Interval in steps that no run reaches."""
STOP_TIMEOUT_S = 30.0
"""Maximum time in seconds to wait until a program that is stopped has ended."""
_STEP = re.compile(r"^step +(\d+)/(\d+) ")
Show = Callable[[str], None]


@dataclass(frozen=True)
class OtherSteps:
    """Steps of another program."""

    seconds: tuple[float, ...]
    """Duration of each step."""
    samples: float
    """Samples in a step."""


@dataclass(frozen=True)
class Trained:
    """A training that has ended."""

    workers: int
    number: int
    """Number of the round, from 1."""
    wall_s: float
    """Seconds from its start to its end."""
    steps: Store | OtherSteps
    """Run directory of the job, or the steps of the other program."""


@dataclass(frozen=True)
class Bench:
    """Trainings to measure."""

    job: Path
    """YAML of the job."""
    loaded: LoadedSpec
    """The job with the user's overrides."""
    overrides: tuple[str, ...]
    """The user's overrides."""
    options: tuple[str, ...]
    """Other options of `undula run`."""
    sizes: tuple[int, ...]
    """Numbers of workers, in the order of the first round."""
    rounds: int
    steps: int
    """Number of steps of each training, with those that do not count."""
    is_weak: bool
    """Whether the plan of the job is the work of each worker, instead of all workers together."""
    limit_s: float
    """Time limit of a training in seconds."""
    address: str | None = None
    """Job API of a cluster that exists, as for `undula run`."""
    against: str | None = None
    """Shell command of another program that trains the same, with PLACEHOLDERS."""

    @property
    def url(self) -> str:
        """Path or URL of the folder with the runs."""
        return f"{self.loaded.spec.run_url}-bench"

    @property
    def count(self) -> int:
        """Number of trainings."""
        return len(self.sizes) * self.rounds * (2 if self.against else 1)

    def global_batch(self, workers: int) -> int:
        return self.loaded.spec.plan.global_batch * (workers if self.is_weak else 1)

    def check(self) -> None:
        """Check all trainings before the first one.

        Raises:
            SpecError: A size is not possible, or the other program's command lacks a placeholder.
        """
        spec, largest = self.loaded.spec, max(self.sizes)
        if spec.plan.batch == "elastic":
            raise SpecError(
                f"{self.loaded.origin('plan.batch')}: plan.batch is elastic, so that steps would not be the same with each number of "
                "workers; add plan.batch=fixed, or also --weak for a batch that grows with them"
            )
        if not self.is_weak and largest > spec.plan.virtual_workers:
            raise SpecError(
                f"command line: --workers has {largest}, more than plan.virtual_workers ({spec.plan.virtual_workers}), and a worker "
                f"without a virtual worker has nothing to do; leave it out, add plan.virtual_workers={largest}, or --weak"
            )
        if missing := [place for place in NEEDED if self.against is not None and place not in self.against]:
            raise SpecError(
                f"command line: --against lacks {missing[0]}, which is replaced for each training; a command needs {', '.join(NEEDED)}"
            )
        for workers in self.sizes:
            self._spec(workers)
        if not (self.address or cluster_at_hand()):
            ours = self._spec(largest).workers
            fix = f", or leave {largest} out of --workers"
            refuse_what_never_fits(
                ours, self.loaded.origins, int(largest * max(ours.cpus, 1)) + 1, largest, "this machine", fix
            )

    def trainings(self, show: Show) -> Iterator[Trained]:
        """Train, and yield each training when it has ended.

        Args:
            show: Callback for lines about the progress.

        Raises:
            RunError: A training has failed.
            ClusterError: A training has exceeded the time limit.
        """
        ways: list[Callable[[int, int, Show], Store | OtherSteps]] = [self._train]
        if self.against:
            ways.append(self._train_other)
        for number, sizes in enumerate(turns(self.sizes, self.rounds), 1):
            for workers in sizes:
                for train in ways if number % 2 else ways[::-1]:
                    began = time.monotonic()
                    steps = train(workers, number, show)
                    yield Trained(workers, number, time.monotonic() - began, steps)

    def own_overrides(self, workers: int, number: int = 1) -> list[str]:
        """Return the overrides of a training. It validates, saves and stops only at its end, and tells no tracker."""
        spec, factor = self.loaded.spec, workers if self.is_weak else 1
        values: dict[str, object] = {
            "name": f"{workers}-workers-{number}",
            "runs": self.url,
            "workers.min": workers,
            "workers.max": workers,
            "plan.max_steps": self.steps,
            "plan.global_batch": spec.plan.global_batch * factor,
            "plan.virtual_workers": spec.plan.virtual_workers * factor,
            "validation.every_steps": NEVER,
            "checkpoint.every_steps": NEVER,
            "checkpoint.keep_best": None,
            "stop": None,
            "trackers": {},
        }
        return as_overrides(values | ({"data.validation": None} if spec.data.validation else {}))

    def _spec(self, workers: int) -> JobSpec:
        return load_spec(self.job, [*self.overrides, *self.own_overrides(workers)]).spec

    def _train(self, workers: int, number: int, show: Show) -> Store:
        overrides = [*self.overrides, *self.own_overrides(workers, number)]
        address = ["--address", self.address] if self.address else []
        undula, store = [sys.executable, "-m", "undula.cli"], open_store(f"{self.url}/{workers}-workers-{number}")
        what = self._name(workers, number)
        command = [*undula, "run", str(self.job), "--fresh", *self.options, *address, "--", *overrides]
        try:
            _run(command, f"the run on {what}", self.limit_s, _end_run, show, f"{what}, ")
        except BaseException:
            if self.address or cluster_at_hand():  # where the job trains on without its command
                with suppress(OSError):
                    subprocess.run(
                        [*undula, "stop", store.url, *address], capture_output=True, stdin=subprocess.DEVNULL
                    )
            raise
        return store

    def _train_other(self, workers: int, number: int, show: Show) -> OtherSteps:
        assert self.against is not None
        with tempfile.TemporaryDirectory(prefix="undula-bench-") as folder:
            out = Path(folder) / "steps.json"
            values = (workers, self.steps, self.global_batch(workers), out)
            command = self.against
            for place, value in zip(PLACEHOLDERS, values, strict=True):
                command = command.replace(place, str(value))
            what = f"the command of --against on {self._name(workers, number)}"
            show(f"step 0/{self.steps} of {what}")
            _run(["/bin/sh", "-c", command], what, self.limit_s, _end_tree)
            return read_steps(out, what)

    def _name(self, workers: int, number: int) -> str:
        return f"{workers} worker{'s' * (workers > 1)} in round {number} of {self.rounds}"


def turns(sizes: Sequence[int], rounds: int) -> list[list[int]]:
    """Return the order of the sizes in each round, which turns, so that no size always follows the same one or comes last."""
    return [[*sizes[number % len(sizes) :], *sizes[: number % len(sizes)]] for number in range(rounds)]


def read_steps(file: Path, what: str) -> OtherSteps:
    """Read what another program has written: a JSON object with `seconds`, the duration of each step, and `samples`, those in a step.

    Raises:
        RunError: The file is missing or has other content; `what` names the program.
    """
    try:
        tree = json.loads(file.read_text())
        steps = OtherSteps(tuple(map(float, tree["seconds"])), float(tree["samples"]))
        if not steps.seconds or min(steps.seconds) <= 0 or steps.samples <= 0:
            raise ValueError("a number is not positive")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(
            f'{what} has not written {{"seconds": [duration of each step], "samples": samples in a step}} as JSON to {{out}} '
            f"({type(error).__name__}: {error})"
        ) from None
    return steps


def _end_run(process: "subprocess.Popen[str]") -> None:
    """End `undula run`, which ends all that it has started."""
    end_group(process, STOP_TIMEOUT_S)


def _end_tree(process: "subprocess.Popen[str]") -> None:
    """End a shell and all that it has started. The shell ends at once, but the programs may need time to end their own processes."""
    members = [process, *descendants(process)]
    for member in members:
        send_signal(member, SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while any(map(is_alive, members)) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    for member in members:
        send_signal(member, SIGKILL)
    process.wait()


def _run(
    command: Sequence[str],
    what: str,
    limit_s: float,
    end: "Callable[[subprocess.Popen[str]], None]",
    show: Show | None = None,
    prefix: str = "",
) -> None:
    """Run a program until it ends, and show the steps that it reports.

    Args:
        command: The program with its arguments.
        what: Name of the training, for messages.
        limit_s: Time limit in seconds.
        end: Function that ends the program before it has ended by itself.
        show: Callback for a line at each reported step; None for none.
        prefix: Text before the seconds in such a line.

    Raises:
        RunError: It has failed. The message has its last lines.
        ClusterError: It has exceeded the time limit.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
        start_new_session=True,  # Ctrl-C must not reach it twice
    )
    began, lines, is_late = time.monotonic(), [""], threading.Event()

    def stop() -> None:
        is_late.set()
        end(process)

    timer = threading.Timer(limit_s, stop)
    timer.daemon = True
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if show and (step := _STEP.match(line)):
                show(f"step {step[1]}/{step[2]} on {prefix}{time.monotonic() - began:.0f} s")
            lines = [*lines[-4:], line.rstrip()]
        status = process.wait()
    finally:
        timer.cancel()
        timer.join()  # the output of a process that is stopped ends a moment before the process does
        end(process)
    last = " | ".join(filter(None, lines))
    if is_late.is_set():
        raise ClusterError(
            f"{what} did not end within {limit_s:.0f} s, perhaps because the cluster lacks room for it; raise --limit, or look at the last "
            f"lines of its output: {last}"
        )
    if status:
        sentence = next((line.removeprefix("undula: ") for line in lines if line.startswith("undula: ")), last)
        raise RunError(f"{what} failed with status {status}: {sentence}")
