import io
import json
import math
import os
import re
import subprocess
import sys
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from report_rows import step_of
from rich.console import Console

from undula.errors import RunError
from undula.report.data.cost import Cost
from undula.report.data.goodput import CLASSES
from undula.report.data.run_record import RecordedRun
from undula.report.data.selection import selection
from undula.report.data.summary import SECONDS_CLASSES, RunSummary, State
from undula.report.render import terminal
from undula.report.render.plots import plot, strip
from undula.report.render.terminal import print_run, print_runs, run_tables
from undula.report.text import duration
from undula.state.events import CrashEvent, FailEvent, GroupEvent, StartEvent, ValidationEvent, WaitingEvent
from undula.state.ledger import EventWriter, LedgerWriter
from undula.storage import Store

FLOATS = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])


def write_run(store: Store, name: str, steps: int = 30, began: float = 1000.0) -> Store:
    """Write a run with half of its steps on two workers, a crash, and the other half on one. Each step takes a second."""
    store.write("job.json", json.dumps({"name": name, "plan_digest": "d" * 64, "total_steps": steps}).encode())
    events = EventWriter(store, "test")
    events.event(StartEvent(2, 1, "the [red]past[/red]", step=0, time=began))
    for attempt, some in ((1, range(steps // 2)), (2, range(steps // 2, steps))):
        ledger = LedgerWriter(store, attempt)
        for step in some:
            values = {"attempt": attempt, "world_size": 3 - attempt, "loss": 5 - step / 10}
            ledger.step(step_of(step, **values, time=began + step + 10 * attempt))
        ledger.close()
    events.event(CrashEvent("failure", "lost \x1b[2Ja node", time=began + 10 + steps / 2))
    events.event(ValidationEvent(1.25, 9, step=steps, time=began + 20 + steps))
    return store


def shown(width: int, print_it: object, store: Store) -> str:
    file = io.StringIO()
    print_it(store, now=2000.0, console=Console(file=file, width=width))  # type: ignore[operator]
    return file.getvalue()


@given(
    st.integers(0, 50).flatmap(lambda n: arrays(np.float64, n, elements=FLOATS)), st.integers(1, 40), st.integers(1, 9)
)
def test_a_plot_has_the_requested_size_for_any_values(ys: np.ndarray, width: int, height: int) -> None:
    lines = plot(np.arange(len(ys)), ys, width, height)
    assert [len(line) for line in lines] == [width] * height
    assert any(line.strip() for line in lines) == bool(np.isfinite(ys).any())


@given(st.lists(st.floats(0, 100), min_size=2, max_size=400), st.integers(2, 40), st.integers(1, 9))
def test_rising_values_plot_as_a_rising_curve(steps: list[float], width: int, height: int) -> None:
    ys = np.cumsum(steps)
    tops = [rows.min() for rows in dot_rows(plot(np.arange(len(ys)), ys, width, height)) if len(rows)]
    assert len(tops) > 1
    assert all(right <= left for left, right in pairwise(tops))


def dot_rows(lines: list[str]) -> list[np.ndarray]:
    """Return the rows of the dots in each column, with 0 on top."""
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
    dots = np.zeros((len(lines) * 4, len(lines[0]) * 2), dtype=bool)
    for row, line in enumerate(lines):
        for column, char in enumerate(line):
            for down, right in np.ndindex(4, 2):
                dots[row * 4 + down, column * 2 + right] = char != " " and bool(
                    (ord(char) - 0x2800) & bits[down][right]
                )
    return [np.flatnonzero(dots[:, column]) for column in range(dots.shape[1])]


def test_a_plot_has_a_gap_at_missing_values() -> None:
    ys = np.ones(100)
    ys[40:60] = np.nan
    (line,) = plot(np.arange(100), ys, 50, 1)
    assert line[21:29].strip() == ""
    assert line[:19].strip()
    assert line[31:].strip()


def test_strip_shows_every_positive_value() -> None:
    assert strip([0, 1, 2, 8, math.nan], 5) == " ▁▂█ "
    assert strip([1, 1000], 2) == "▁█"
    assert strip([], 3) == "   "


def test_runs_are_listed_newest_first_and_unreadable_ones_with_the_reason(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_run(store / "older", "older", began=100.0)
    write_run(store / "newer", "[bold]newer[/bold]", began=1900.0)
    (store / "broken").write("ledger/steps-000001-00000.parquet", b"junk")
    (store / "elsewhere").write("notes.txt", b"no run")
    (store / "rates").write("study.json", b"{}")
    write_run(store / "rates/trials/one", "one")
    text = shown(120, print_runs, store)
    assert text.index("newer") < text.index("older") < text.index("broken")
    assert "has no job.json" in text
    assert "elsewhere" not in text
    assert f"rates is a study; use `undula study status {tmp_path}/rates`" in text
    assert "\x1b" not in text


LIST_AS_ANOTHER_USER = """
import os, sys
from undula.report.render.terminal import print_runs
from undula.storage import Store
os.setgid(65534)
os.setuid(65534)
print_runs(Store(sys.argv[1]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_run_that_only_its_owner_may_read_does_not_hide_the_others() -> None:
    with TemporaryDirectory() as folder:  # pytest's folder is this user's alone
        Path(folder).chmod(0o755)
        for name in ("alice", "bob"):
            write_run(Store(f"{folder}/{name}"), name)
        Path(folder, "bob").chmod(0o700)
        command = [sys.executable, "-c", LIST_AS_ANOTHER_USER, folder]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert re.search(r"alice +stopped +30/30", lines)
        assert re.search(r"bob +unreadable", lines)
        assert f"unreadable: {folder}/bob is not readable" in lines


@pytest.mark.parametrize(
    ("where", "listed"), [([], ["left", "new"]), (["state=pending"], ["new"]), (["state=running"], ["left"]), (["steps>=0"], ["left"])]
)  # fmt: skip
def test_the_state_of_a_run_is_that_of_its_job_which_may_have_no_directory_yet(
    tmp_path: Path, where: list[str], listed: list[str]
) -> None:
    store = Store(str(tmp_path))
    write_run(store / "left", "left")
    jobs: dict[str, State] = {"left": "running", "new": "pending"}
    text = shown(120, partial(print_runs, jobs=jobs, selection=selection(where, None)), store)
    assert bool(re.search("left +running", text)) == ("left" in listed)
    assert ("new is pending and has no directory yet" in text) == ("new" in listed)


def test_several_runs_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, together, read = Store(str(tmp_path)), threading.Barrier(terminal.READERS, timeout=60), terminal.read_run
    for number in range(terminal.READERS):
        write_run(store / f"run-{number}", "run", steps=2)

    def read_with_others(run: Store) -> RecordedRun:
        together.wait()
        return read(run)

    monkeypatch.setattr(terminal, "read_run", read_with_others)
    text = shown(120, print_runs, store)
    assert all(f"run-{number} " in text for number in range(terminal.READERS))


@pytest.mark.parametrize("width", [80, 120])
def test_the_list_of_runs_truncates_no_word(tmp_path: Path, width: int) -> None:
    store, name = Store(str(tmp_path)), "language-model-20261123-091502"
    write_run(store / name, name, steps=1200, began=100.0)
    (store / "broken").write("job.json", b"{")
    text = shown(width, print_runs, store)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in (name, "stopped", "1200/1200", "val. loss", "1.250", "samples/s", "8.00", "unreadable", "min ago"):
        assert word in text


def test_the_list_of_runs_takes_a_second_line_only_if_one_is_too_short(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_run(store / "short", "short")
    (row,) = [line for line in shown(80, print_runs, store).splitlines() if "short" in line]
    assert "30/30" in row
    write_run(store / ("long" * 12), "long")
    lines = shown(80, print_runs, store).splitlines()
    place = lines.index(" short")
    assert lines[place + 1].split()[:2] == ["stopped", "30/30"]
    assert lines[place + 1].index("30/30") + len("30/30") == lines[2].index("step") + len("step")


@pytest.mark.parametrize(
    ("file", "reason"), [("study.json", "is a study; use `undula study status`"), ("notes.txt", r"no job\.json")]
)
def test_a_directory_without_a_run_is_refused(tmp_path: Path, file: str, reason: str) -> None:
    store = Store(str(tmp_path))
    store.write(file, b"{}")
    with pytest.raises(RunError, match=reason):
        print_run(store)


def test_the_list_as_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(str(tmp_path))
    write_run(store / "good", "good")
    (store / "broken").write("job.json", b"{")
    print_runs(store, json=True)
    good, broken = json.loads(capsys.readouterr().out)
    assert (good["run"], good["steps"], good["last_validation_loss"]) == ("good", 30, 1.25)
    assert broken["run"] == "broken"
    assert "damaged" in broken["error"]


def test_an_empty_folder_is_reported_in_one_sentence(tmp_path: Path) -> None:
    assert shown(200, print_runs, Store(str(tmp_path / "none"))).startswith("no runs below")


@pytest.mark.parametrize("width", [80, 120])
def test_a_run_fits_the_terminal_and_no_word_is_truncated(tmp_path: Path, width: int) -> None:
    text = shown(width, print_run, write_run(Store(str(tmp_path)), "[blink]run"))
    assert max(map(len, text.splitlines())) <= width
    for part in ("[blink]run", "loss over samples", "world size (1–2)", "1 crash", "compute", "●", "past[/red]"):
        assert part in text
    assert "…" not in text
    assert "\x1b" not in text


LARGE = st.integers(0, 10**12)


@given(
    st.sampled_from([80, 100, 110, 140]), LARGE, LARGE, st.lists(st.floats(0, 1e9), min_size=12, max_size=12),
    st.sampled_from(["running", "finished", "stopped"]), st.floats(0, 1e7),
)  # fmt: skip
def test_the_largest_figures_fit_the_terminal_and_no_word_is_truncated(
    width: int, steps: int, samples: int, amounts: list[float], state: str, spent: float
) -> None:
    """The run has every figure, with any value."""
    seconds = dict(zip(SECONDS_CLASSES, amounts[:5], strict=True))
    rank_seconds = dict(zip(CLASSES, amounts[5:11], strict=True))
    summary = RunSummary(
        name="run", state=state, steps=steps, total_steps=steps, samples=samples, total_samples=samples,  # type: ignore[arg-type]
        first_validation_loss=amounts[0], last_validation_loss=amounts[1], best_validation_loss=amounts[2],
        best_validation_step=steps, training_loss=amounts[3], samples_per_s=amounts[11], began=0.0, latest=amounts[0],
        wall_s=amounts[11], replayed_steps=steps, skipped_steps=steps, attempts=steps, crashes=steps, resizes=steps, checkpoints=steps,
        world_sizes=(1, 2, 512), seconds=seconds, rank_seconds=rank_seconds, goodput=0.5,
    )  # fmt: skip
    dollars_by_class = dict.fromkeys(CLASSES, spent / 6)
    cost = Cost(dollars_by_class, {"spot": spent, "on-demand": 0.0}, None, samples, steps, (), ("ours of 2026",), ())
    file = io.StringIO()
    console = Console(file=file, width=width)
    console.print(run_tables(summary, cost, width))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    shown_words = set(text.split())
    expected = [
        *(f"{value:,}" for value in (steps, samples)),
        *duration(amounts[0]).split(),
        *(duration(seconds["other"])).split(),
    ]
    assert not [word for word in expected if not any(word in each for each in shown_words)]


def test_a_run_without_steps_is_shown(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("job.json", b'{"name": "young"}')
    assert "no step has been committed yet" in shown(80, print_run, store)


def test_a_run_that_failed_names_its_error_until_it_trains_again(tmp_path: Path) -> None:
    store = write_run(Store(str(tmp_path)), "run")
    EventWriter(store, "driver").event(FailEvent("rank 0: KeyError: 'lable' at job.py:7", time=1100.0))
    lines = shown(120, print_run, store).splitlines()
    assert lines[:2] == ["run  failed", "training failed: rank 0: KeyError: 'lable' at job.py:7"]
    EventWriter(store, "driver").event(StartEvent(2, 3, "a checkpoint", step=30, time=1200.0))
    assert "training failed:" not in shown(120, print_run, store)


def test_the_list_has_the_error_of_a_run_that_failed(tmp_path: Path) -> None:
    store = write_run(Store(str(tmp_path)) / "buggy", "buggy")
    EventWriter(store, "driver").event(FailEvent("rank 0: KeyError: 'lable' at job.py:7", time=1100.0))
    text = shown(120, print_runs, Store(str(tmp_path)))
    assert re.search(r"buggy +failed +30/30", text)
    assert "buggy failed: rank 0: KeyError: 'lable' at job.py:7" in text


def test_the_list_says_what_a_run_waits_for_until_it_trains(tmp_path: Path) -> None:
    store = write_run(Store(str(tmp_path)) / "digits", "digits")
    now = 1990.0
    EventWriter(store, "driver").event(StartEvent(2, 2, step=1, time=1200.0))
    EventWriter(store, "driver").event(WaitingEvent(1, 0, 3, rivals=("letters",), time=now))
    listed = partial(shown, 160, print_runs, Store(str(tmp_path)))
    assert (
        "digits: The run waits for 2 more workers, as does letters (1 ready, 0 starting, at least 3 needed)."
        in listed()
    )
    EventWriter(store, "driver").event(GroupEvent((), time=now + 1))
    assert "waits" not in listed()


def test_a_run_as_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_run(write_run(Store(str(tmp_path)), "run"), json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["steps"], document["world_sizes"], document["crashes"]) == (30, [1, 2], 1)
    assert [event["kind"] for event in document["events"]] == ["start", "crash", "validation"]
