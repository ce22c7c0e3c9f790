"""Every fault that a cluster of spot nodes knows, and the same bits as a run that was left alone."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_text import MODEL, PLAN, write_text

from undula.report.certificate import certify, data_of
from undula.report.goodput import goodput
from undula.report.summary import read_run
from undula.storage import open_store
from undula.testing.chaos import Chaos, start_driver
from undula.testing.faults import Fault, parse_faults
from undula.testing.nodes import Nodes, nodes

SCRIPT = Path(__file__).parents[2] / "jobs" / "language_model.py"
STEPS = 100
SCHEDULED_STEPS = 130
# Wide enough for a step to take a tenth of a second: faults are placed by the step.
JOB = (
    *MODEL,
    *PLAN,
    *("config.model.width=192", "config.model.layers=4", "config.model.dropout=0.1", "deterministic=true"),
    "schedule.decay=constant",
    *("checkpoint.every_steps=25", "validation.every_steps=50", "workers.min=1", "workers.grow=always"),
)
SCHEDULE = """
at step 10: sigkill worker 1
at step 25: sigkill worker 0
at step 40: sigstop worker 1
at step 50: drain node 1 deadline 8
at step 55: add node
at step 80: kill node 0
"""


pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with nodes() as running:
        for _ in range(2):
            running.add()
        running.await_all()
        yield running


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def alone(cluster: Nodes, text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a run that nothing happened to, on one worker."""
    runs = str(tmp_path_factory.mktemp("runs"))
    driver = start_driver(
        command(text, runs, "alone", f"plan.max_steps={SCHEDULED_STEPS}", "workers.max=1"), cluster, print
    )
    assert driver.process.wait(240) == 0
    return f"{runs}/alone"


def command(text: str, runs: str, name: str, *overrides: str) -> list[str]:
    data = (f"data.train={text}/train", f"data.validation={text}/validation")
    return [sys.executable, str(SCRIPT), f"name={name}", f"runs={runs}", *data, *JOB, *overrides]


def run_through(faults: tuple[Fault, ...], cluster: Nodes, text: str, runs: str, steps: int) -> Chaos:
    while len(cluster.nodes) < 2:
        cluster.add()
    cluster.await_all()
    store = open_store(f"{runs}/chaos")
    driver = start_driver(command(text, runs, "chaos", f"plan.max_steps={steps}", "workers.max=2"), cluster, print)
    chaos = Chaos(cluster, store, driver)
    try:
        assert chaos.run(faults, limit_s=200) == 0, driver.lines[-5:]
    finally:
        driver.stop()
    return chaos


def assert_certified(runs: str, alone: str, steps: int) -> None:
    run, other = read_run(open_store(f"{runs}/chaos")), read_run(open_store(alone))
    certificate = certify(run, data_of(run))
    assert certificate.holds, certificate.difference
    assert run.ledger.steps["loss"].to_pylist() == other.ledger.steps["loss"].to_pylist()[:steps]
    digests = run.ledger.steps["weights_digest"].to_pylist()
    assert [digest for digest in digests if digest] == [
        digest for digest in other.ledger.steps["weights_digest"].to_pylist()[:steps] if digest
    ]
    seconds = goodput(run.ledger, run.events)
    assert min(seconds.seconds.values()) >= -0.01 * seconds.held_s


def test_every_fault_leaves_the_run_what_it_would_have_been(
    cluster: Nodes, text: str, alone: str, tmp_path: Path
) -> None:
    chaos = run_through(parse_faults(SCHEDULE), cluster, text, str(tmp_path), SCHEDULED_STEPS)
    assert len(chaos.done) == 6
    assert_certified(str(tmp_path), alone, SCHEDULED_STEPS)
    events = read_run(open_store(f"{tmp_path}/chaos")).events
    told = " | ".join(event.message for event in events)
    assert "made no step for" in told
    assert "resumed from the memory of a worker" in told


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak)])
def test_random_faults_leave_the_run_what_it_would_have_been(
    cluster: Nodes, text: str, alone: str, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    faults: list[Fault] = []
    alive, added = [0, 1], 2
    for step in range(10, STEPS, 10):
        action = chance.choice(["sigkill", "sigkill", "sigstop", "kill"])
        target, at_step = chance.randrange(2), step + chance.randrange(5)
        if action != "kill":
            faults.append(Fault(action, at_step=at_step, target=target))  # type: ignore[arg-type]
            continue
        faults += [Fault("kill", at_step=at_step, target=alive.pop(target)), Fault("add", at_step=at_step)]
        alive.append(added)
        added += 1
    chaos = run_through(tuple(faults), cluster, text, str(tmp_path), STEPS)
    # A signal waits for a group that has such a rank, which may come after the last step.
    assert len(chaos.done) >= len(faults) - 2
    assert_certified(str(tmp_path), alone, STEPS)
