"""Helpers that run a job under faults and compare it bit for bit with a run without faults."""

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from alone import train_alone
from small_text import ENDLESS, MODEL, PLAN
from waiting import wait_until

from undula.report.data.certificate import certify, data_of
from undula.report.data.goodput import goodput
from undula.report.data.run_record import read_run
from undula.state.events import Event, StartEvent, WaitingEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store, open_store
from undula.testing.chaos import Chaos, Driver, start_driver
from undula.testing.faults import Fault
from undula.testing.nodes import Nodes

E = TypeVar("E", bound=Event)
SCRIPT = Path(__file__).parents[2] / "jobs" / "language_model.py"
SCHEDULED_STEPS = 130
PACE_S = 0.1
SLOW_S = 0.3
"""Seconds per step of a run that only waits for nodes most of the time: more steps would only take processor time from the nodes."""
JOB = (
    *MODEL,
    *PLAN,
    "config.model.dropout=0.1",
    "schedule.decay=constant",
    *("checkpoint.every_steps=25", "validation.every_steps=50", "workers.min=1", "workers.grow=always"),
)
STEPS_ALONE = (*ENDLESS, "checkpoint.every_steps=1000", "data.validation=null")
"""Overrides of a job that runs until it is stopped, and rarely does anything but steps."""

FULL_SPEED = "full-speed"
"""Name of a file that ends the waiting of steps."""

LONG_LIVED = {"worker": "ray::ElasticWorker", "controller": "ray::ElasticController", "gcs": "gcs_server"}
"""Parts of the titles of processes, by name."""

WRAPPED = """
import time
from pathlib import Path

import language_model
import undula
from language_model import Config

def before(step):
    pass

def prepared(module):
    return module

{hook}

def train(run):
    original_steps, original_model = run.steps, run.model
    def steps(validate=None):
        began = time.monotonic()
        for step in original_steps(validate=validate):
            before(step)
            if not Path({full_speed!r}).exists():
                time.sleep(max(began + {pace_s} - time.monotonic(), 0.0))
            began = time.monotonic()
            yield step
    run.steps = steps
    run.model = lambda module: original_model(prepared(module))
    language_model.train(run)

if __name__ == "__main__":
    undula.main(train, config=Config)
"""


def wrapped(folder: Path, hook: str = "", pace_s: float = PACE_S) -> Path:
    """Write a script of the main job in which a step takes at least `pace_s` seconds, because faults are scheduled by step.

    The code `hook` can define `before`, which is called at each step, and `prepared`, which is applied to the model.
    After `release`, steps take as long as they need.
    """
    path = folder / "job" / "wrapped.py"
    shutil.copytree(SCRIPT.parent, path.parent)
    path.write_text(WRAPPED.format(hook=hook, pace_s=pace_s, full_speed=str(folder / FULL_SPEED)))
    shutil.copy(SCRIPT.with_suffix(".yaml"), path.with_suffix(".yaml"))
    return path


def release(folder: Path) -> None:
    """Let the steps of a script that `wrapped` has written below a folder take as long as they need."""
    (folder / FULL_SPEED).touch()


def command(text: str, runs: str, name: str, *overrides: str, script: Path | None = None) -> list[str]:
    """Return the command that runs a script; by default, the main job at the pace of `wrapped`."""
    script = script or wrapped(Path(runs))
    data = (f"data.train={text}/train", f"data.validation={text}/validation")
    return [sys.executable, str(script), f"name={name}", f"runs={runs}", *data, *JOB, *overrides]


def have_nodes(spot: Nodes, count: int) -> None:
    """Start or kill nodes until the cluster has `count` besides its head."""
    while len(spot.nodes) > count:
        spot.kill(spot.nodes[0])
    while len(spot.nodes) < count:
        spot.add()
    spot.await_all()


def run_through(
    faults: Sequence[Fault], spot: Nodes, job: Sequence[str], url: str, steps_after: int | None = None
) -> Chaos:
    """Run a job of two workers under faults, from its first step to its last or to `steps_after` steps after the last fault."""
    have_nodes(spot, 2)
    driver = start_driver([spot.cluster.python, *job[1:], "workers.max=2"], spot.cluster, print)
    chaos = Chaos(spot, open_store(url), driver)
    try:
        status = chaos.run(faults, limit_s=600, steps_after=steps_after)
        assert status == (0 if steps_after is None else None), driver.lines[-5:]
    finally:
        driver.stop()
    return chaos


def steps_of(url: str) -> int:
    """Return the number of steps that a run has made."""
    return len(read_run(open_store(url)).ledger.steps)


def alone_for(steps: int, text: str, runs: str) -> str:
    """Train without faults, on one worker, for more than a number of steps, and return the URL of the run.

    The last step of the run is later, because it has a digest of the weights, which a run that goes on does not have there.
    """
    return train_alone(command(text, runs, "alone", *ENDLESS, f"plan.max_steps={steps + 1}", script=SCRIPT)).url


def assert_certified(url: str, alone: str, steps: int) -> None:
    run, other = read_run(open_store(url)), read_run(open_store(alone))
    certificate = certify(run, data_of(run))
    assert certificate.holds, certificate.difference
    assert run.ledger.steps["loss"].to_pylist() == other.ledger.steps["loss"].to_pylist()[:steps]
    digests = run.ledger.steps["weights_digest"].to_pylist()
    assert [digest for digest in digests if digest] == [
        digest for digest in other.ledger.steps["weights_digest"].to_pylist()[:steps] if digest
    ]
    seconds = goodput(run.ledger, run.events)
    assert min(seconds.seconds.values()) >= -0.01 * seconds.held_s


def events_in(url: str, event_type: type[E]) -> list[E]:
    """Return the events of one type of a run, in order of time."""
    return [event for event in read_run(open_store(url)).events if isinstance(event, event_type)]


def origins_in(url: str) -> set[str | None]:
    """Return the sources of the state of a run's worker groups; None is a fresh start."""
    return {start.origin for start in events_in(url, StartEvent)}


def waits_for_one_worker(starts: Sequence[StartEvent], waits: Sequence[WaitingEvent]) -> bool:
    """Return whether a job has lost a worker and waited for another one. A job also waits before its first start."""
    return any(wait.needed - wait.ready == 1 for wait in waits if starts and wait.time > starts[0].time)


@dataclass(frozen=True)
class Running:
    """A running job, and the steps and events that it has recorded so far."""

    driver: Driver
    store: Store

    def rows(self) -> list[dict[str, Any]]:
        return read_ledger(self.store).steps.to_pylist() if self.store.exists("ledger") else []

    def sizes(self) -> list[int]:
        return [row["world_size"] for row in self.rows()]

    def of(self, event_type: type[E]) -> list[E]:
        return events_of(read_ledger(self.store).events, event_type) if self.store.exists("ledger") else []

    def waits_for_one_worker(self) -> bool:
        """Return whether the job has lost a worker and waits for another one."""
        return waits_for_one_worker(self.of(StartEvent), self.of(WaitingEvent))

    def wait_for_group(self, size: int, after: int, steps: int) -> None:
        """Wait until a group of `size` workers, of a later attempt than `after`, has made `steps` steps."""
        self.wait_for(lambda: sum(row["attempt"] > after and row["world_size"] == size for row in self.rows()) > steps)

    def wait_for(self, condition: Callable[[], bool], limit_s: float = 300) -> None:
        wait_until(condition, limit_s, self.driver.process, self.driver.last_lines, interval_s=0.2)


@contextmanager
def running(
    spot: Nodes,
    text: str,
    folder: Path,
    num_nodes: int,
    *settings: str,
    pace_s: float = PACE_S,
    hook: str = "",
    runs: str | None = None,
    limit_s: float = 300,
) -> Iterator[Running]:
    """Start the job on a cluster with `num_nodes` nodes, wait for its first steps, and stop it after the block.

    Its script is below `folder`, and its run directory too unless `runs` is another URL.
    """
    runs = runs or str(folder)
    have_nodes(spot, num_nodes)
    _, *script = command(text, runs, "run", *STEPS_ALONE, *settings, script=wrapped(folder, hook, pace_s))
    driver = start_driver([spot.cluster.python, *script], spot.cluster, print)
    job = Running(driver, open_store(f"{runs}/run"))
    try:
        job.wait_for(lambda: len(job.of(StartEvent)) > 0, limit_s)
        yield job
    finally:
        driver.stop()


def long_lived(cluster: Nodes, driver: psutil.Process, kept: str) -> dict[str, psutil.Process]:
    """Return the processes that live as long as a test: the driver, and those of the head and of the node that is kept."""
    found = {"driver": driver}
    for processes, place in ((cluster.processes_of(kept), "node"), (cluster.head_processes(), "head")):
        for process in processes:
            with suppress(psutil.Error):  # it has just ended
                title = " ".join(process.cmdline())
                for name, text in LONG_LIVED.items():
                    if text in title:
                        found.setdefault(name, process)
                if title.split(" ")[0].endswith("raylet/raylet"):
                    found[f"raylet of the {place}"] = process
    return found
