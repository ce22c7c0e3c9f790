import io
import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rich.console import Console

from undula.errors import RunError
from undula.report.render.terminal import plot, print_run, print_runs, strip
from undula.state.events import CrashEvent, StartEvent, ValidationEvent
from undula.state.ledger import EventWriter, LedgerWriter
from undula.state.records import StepRow
from undula.storage import Store

FLOATS = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])


def write_run(store: Store, name: str, steps: int = 30, began: float = 1000.0) -> Store:
    """Half the steps with two workers, a crash, half with one; a second each."""
    store.write("job.json", json.dumps({"name": name, "plan_digest": "d" * 64, "total_steps": steps}).encode())
    events = EventWriter(store, "test")
    events.event(StartEvent(2, 1, "the [red]past[/red]", step=0, time=began))
    for attempt, some in ((1, range(steps // 2)), (2, range(steps // 2, steps))):
        ledger = LedgerWriter(store, attempt)
        for step in some:
            row = (attempt, step, 0, (step + 1) * 8, 8, 3 - attempt, 5 - step / 10, 0.1, 0.1, 0.5, 0.3, 0.1, 0)
            ledger.step(StepRow(*row, time=began + step + 10 * attempt))
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
def test_plot_has_the_size_asked_for_whatever_the_values(ys: np.ndarray, width: int, height: int) -> None:
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
    """By column of dots, the rows of its dots, 0 on top."""
    places = (
        (0, 0, 0x01),
        (1, 0, 0x02),
        (2, 0, 0x04),
        (3, 0, 0x40),
        (0, 1, 0x08),
        (1, 1, 0x10),
        (2, 1, 0x20),
        (3, 1, 0x80),
    )
    dots = np.zeros((len(lines) * 4, len(lines[0]) * 2), dtype=bool)
    for row, line in enumerate(lines):
        for column, char in enumerate(line):
            for down, right, bit in places:
                dots[row * 4 + down, column * 2 + right] = char != " " and bool((ord(char) - 0x2800) & bit)
    return [np.flatnonzero(dots[:, column]) for column in range(dots.shape[1])]


def test_plot_leaves_a_gap_where_there_is_no_value() -> None:
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
    assert f"rates is a study: undula study status {tmp_path}/rates" in text
    assert "\x1b" not in text


def test_a_study_is_not_shown_as_a_run(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("study.json", b"{}")
    with pytest.raises(RunError, match="is a study: `undula study status` tells of it"):
        print_run(store)


def test_list_as_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(str(tmp_path))
    write_run(store / "good", "good")
    (store / "broken").write("job.json", b"{")
    print_runs(store, json=True)
    good, broken = json.loads(capsys.readouterr().out)
    assert (good["run"], good["steps"], good["last_validation_loss"]) == ("good", 30, 1.25)
    assert broken["run"] == "broken"
    assert "damaged" in broken["error"]


def test_no_runs_is_a_plain_sentence(tmp_path: Path) -> None:
    assert shown(200, print_runs, Store(str(tmp_path / "none"))).startswith("no runs below")


@pytest.mark.parametrize("width", [80, 120])
def test_run_fits_the_terminal_and_keeps_its_words(tmp_path: Path, width: int) -> None:
    text = shown(width, print_run, write_run(Store(str(tmp_path)), "[blink]run"))
    assert max(map(len, text.splitlines())) <= width
    for part in ("[blink]run", "loss over samples", "world size (1–2)", "1 crash", "compute", "●", "past[/red]"):
        assert part in text
    assert "…" not in text
    assert "\x1b" not in text


def test_run_without_steps_is_shown(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("job.json", b'{"name": "young"}')
    assert "no step has been committed yet" in shown(80, print_run, store)


def test_run_as_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_run(write_run(Store(str(tmp_path)), "run"), json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["steps"], document["world_sizes"], document["crashes"]) == (30, [1, 2], 1)
    assert [event["kind"] for event in document["events"]] == ["start", "crash", "validation"]


def test_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no job\.json"):
        print_run(Store(str(tmp_path)))
