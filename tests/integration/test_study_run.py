"""Tests of `undula study`: the results of a study do not depend on failures of its driver and its trials."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from study_kit import Studies
from trackers_kit import assert_on_tensorboard

from undula.cluster.local import LocalCluster
from undula.report.data.certificate import certify, data_of
from undula.report.data.run_record import read_run
from undula.storage import open_store
from undula.study.records import TRIALS

RATES = [1e-3, 1e-2]


@pytest.fixture
def studies(cluster: LocalCluster, text: str, tmp_path: Path) -> Studies:
    return Studies(cluster, text, tmp_path)


@pytest.fixture(scope="module")
def whole(cluster: LocalCluster, text: str, tmp_path_factory: pytest.TempPathFactory) -> Studies:
    """Run a study without interruption and return its runner."""
    studies = Studies(cluster, text, tmp_path_factory.mktemp("whole"))
    studies.run(studies.file("whole", packed=1, base_lrs=RATES))
    return studies


@pytest.mark.nightly
@pytest.mark.parametrize(
    "signals",
    [
        # Python answers SIGINT as it does SIGTERM.
        pytest.param((signal.SIGKILL, signal.SIGTERM), id="SIGTERM"),
        pytest.param((signal.SIGKILL, signal.SIGTERM, signal.SIGINT), id="SIGINT", marks=pytest.mark.nightly),
    ],
)
def test_stopping_the_driver_does_not_change_the_results(
    studies: Studies, whole: Studies, signals: Sequence[signal.Signals]
) -> None:
    table = whole.table("whole")
    assert [row["state"] for row in table] == ["complete"] * 4
    runs = [read_run(whole.store("whole") / TRIALS / row["name"]) for row in table]
    assert [sum(event.kind == "start" for event in run.events) for run in runs] == [1] * 4, "a trial was trained twice"
    for row in table:
        assert_on_tensorboard(whole.store("whole") / TRIALS / row["name"])

    file = studies.file("killed", packed=1, base_lrs=RATES)
    ended: dict[str, int] = {}
    for count, number in enumerate(signals, 1):
        driver = studies.start(file)
        studies.await_outcomes(driver, "killed", count)
        driver.send_signal(number)
        out, _ = driver.communicate(timeout=300)
        if number == signal.SIGKILL:
            assert driver.returncode == -number
        else:
            assert driver.returncode == 130, out[-3000:]
            assert "run the same command to continue" in out
            assert "Traceback" not in out
        assert ended.items() <= studies.outcomes("killed").items(), "a trial that had ended was run again"
        ended = studies.outcomes("killed")
        assert len(ended) < 4
        assert {row["state"] for row in studies.table("killed")} <= {"complete", "running", "waiting"}
    out = studies.run(file)
    assert ended.items() <= studies.outcomes("killed").items()
    assert studies.table("killed") == table
    assert "the best learning rate" in out
    assert studies.store("killed").exists("report/index.html")


def test_a_study_that_cannot_be_trained_is_refused(studies: Studies) -> None:
    out, _ = (driver := studies.start(studies.file("slow", packed=1, warmups=[0, 1000]))).communicate(timeout=300)
    assert driver.returncode == 2
    assert "adamw-none-b12-lr0.001-w1000-s0 has a warmup of 1,000 samples but only 960 samples in all" in out
    open_store(str(studies.folder / "run")).write("job.json", b"{}")
    out, _ = (driver := studies.start(studies.file("run", packed=1))).communicate(timeout=300)
    assert driver.returncode == 2
    assert "/run is the directory of a run; give the study another name" in out


@pytest.mark.nightly
def test_lagging_trials_are_stopped_and_stay_stopped(studies: Studies) -> None:
    keys = {
        "packed": 1,
        "scheduler": "asha",
        "max_concurrent": 1,
        "rung_ratio": 2,
        "base_lrs": [1e-2, 1e-4, 1e-5, 1e-6],
        "warmups": [240],
    }
    out = studies.run(studies.file("halving", **keys))
    assert "note: the report will not cover learning rates of trials that ASHA stops during their warmup" in out
    table = studies.table("halving")
    assert {row["state"] for row in table} == {"complete", "stopped"}
    assert all(row["samples"] < 960 for row in table if row["state"] == "stopped")
    assert "stopped  after" in out
    before = studies.outcomes("halving")
    assert "0 running" not in studies.run(studies.file("halving", **keys))
    assert studies.outcomes("halving") == before
    assert studies.table("halving") == table


def test_unpacked_trials_are_runs_with_certificates(studies: Studies) -> None:
    file = studies.file("elastic", base_lrs=[1e-2], overrides={"workers.min": 1, "workers.max": 2}, rules=["sqrt"])
    studies.run(file)
    table = studies.table("elastic")
    assert [(row["batch"], row["rule"], row["state"]) for row in table] == [
        (12, "sqrt", "complete"),
        (24, "sqrt", "complete"),
    ]
    assert [row["lr"] for row in table] == pytest.approx([1e-2, 1e-2 * 2**0.5])
    for row in table:
        store = studies.store("elastic") / TRIALS / row["name"]
        run = read_run(store)
        assert certify(run, data_of(run)).holds
        assert_on_tensorboard(store)


@pytest.mark.nightly
def test_a_failed_or_diverged_trial_does_not_affect_the_others(studies: Studies, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(studies.file('x', packed=1)).parent)!r})\n"
        "import undula\n"
        "import language_model\n"
        "def train(run):\n"
        f"    if run.base_lr == 1e-3 and not Path({str(tmp_path / 'fixed')!r}).exists():\n"
        "        raise KeyError('no such thing')\n"
        "    language_model.train(run)\n"
        "if __name__ == '__main__':\n"
        "    undula.main(train, config=language_model.Config)\n"
    )
    for name in ("language_model.py", "gpt.py"):
        (tmp_path / name).write_text((Path(__file__).parents[2] / "jobs" / name).read_text())
    file = studies.file("failing", packed=2, batches=[24], base_lrs=[1e-3, 1e-2, 1e6])
    assert "1 trial failed; run the same command to try again" in studies.run(file, script=script, status=1)
    states = {row["base_lr"]: (row["state"], row["message"]) for row in studies.table("failing")}
    assert states[1e-3] == ("failed", "KeyError: 'no such thing'")
    assert states[1e-2] == ("complete", "")
    assert states[1e6][0] == "diverged"

    (tmp_path / "fixed").touch()
    assert "trying 1 failed trial again" in studies.run(file, script=script)
    assert [row["state"] for row in studies.table("failing")] == ["complete", "complete", "diverged"]


def test_a_study_can_be_extended_but_not_changed(whole: Studies) -> None:
    ended = whole.outcomes("whole")
    rates = [*RATES, 2e-2]
    whole.run(whole.file("whole", packed=1, base_lrs=rates))
    assert ended.items() < whole.outcomes("whole").items()
    driver = whole.start(whole.file("whole", packed=1, samples=480))
    out, _ = driver.communicate(timeout=300)
    assert driver.returncode == 2
    assert "was started with samples 960, but it is 480 now" in out
    command = [sys.executable, "-m", "undula.cli", "study", "status", str(whole.folder / "whole"), "--json"]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)["trials"]
    assert [row["base_lr"] for row in rows] == [rate for rate in rates for _ in range(2)]
