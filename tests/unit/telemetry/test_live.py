"""Tests of the live view: one status line per second, which is rewritten only on a terminal, and a line for each event."""

import io
import os

import pytest

from undula.state.events import CrashEvent, StartEvent
from undula.telemetry.live import LiveScreen, message_lines, status_line
from undula.telemetry.messages import Line, Status, clock


def status(step: int) -> Status:
    return Status(step, 400, loss=2.41306, lr=2.1e-3, samples_per_s=1812.4, world_size=2, seconds_left=41)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_status_has_the_progress_of_the_run() -> None:
    assert status_line(status(120)) == "step 120/400  loss 2.4131  lr 2.10e-03  1,812 samples/s  2 workers  0:41 left"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (727, "12:07"), (10935, "3:02:15")])
def test_durations_are_formatted_like_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_last_status_and_all_other_messages_are_shown() -> None:
    crash = CrashEvent("failure", "a worker died", time=0)
    lines = message_lines([status(1), crash, Line(1, "hello"), status(2)])
    assert [line.split("  ")[-1] for line in lines[:2]] == [crash.message, "rank 1: hello"]
    assert lines[2].startswith("step   2/400")
    assert len(lines) == 3


def test_a_status_of_the_former_group_is_not_shown_below_the_start_of_the_next_one() -> None:
    start = StartEvent(1, 2, "the memory of a node", step=2, time=0)
    (line,) = message_lines([status(1), start])
    assert "with 1 worker" in line
    assert message_lines([status(1), start, status(3)])[1].startswith("step   3/400")


def test_lines_are_not_rewritten_outside_a_terminal() -> None:
    out = io.StringIO()
    screen = LiveScreen(out)
    for line in ("step 1", "event", "step 2"):
        screen.show(line)
    screen.close()
    assert out.getvalue() == "step 1\nevent\nstep 2\n"


def test_an_event_is_printed_above_the_status_on_a_terminal() -> None:
    out = Terminal()
    screen = LiveScreen(out)
    for line in ("step 1", "event", "step 2"):
        screen.show(line)
    screen.close()
    shown = out.getvalue().replace("\r\x1b[J", "<")
    assert shown == "step 1<event\nstep 1<step 2\n"


def test_the_result_is_printed_below_the_last_status_on_a_terminal() -> None:
    out = Terminal()
    screen = LiveScreen(out)
    for line in ("step 2/2", "finished: no validation", "run directory: /runs/a"):
        screen.show(line)
    screen.close()
    assert out.getvalue() == "step 2/2\nfinished: no validation\nrun directory: /runs/a\n"


def test_an_event_is_broken_between_words_on_a_terminal_and_a_printed_line_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((40, 24)))
    out = Terminal()
    screen = LiveScreen(out)
    event, printed = (
        "09:00:00  rank 0 is process 1, rank 1 is process 2.",
        "undula show /a/path/that/takes/more/than/a line",
    )
    for line in (event, printed):
        screen.show(line)
    assert out.getvalue().splitlines() == ["09:00:00  rank 0 is process 1, rank 1 is", "          process 2.", printed]


def test_a_table_is_drawn_over_the_last_one_on_a_terminal() -> None:
    out = Terminal()
    screen = LiveScreen(out)
    for line in ("┏━┓", "┃1┃", "└─┘", "event", "┏━┓", "┃2┃", "┗━┛", "report"):
        screen.show(line)
    screen.close()
    shown = out.getvalue().replace("\x1b[2A\r\x1b[J", "<")
    assert shown == "┏━┓\n┃1┃\n└─┘<event\n┏━┓\n┃1┃\n└─┘<┏━┓\n┃2┃\n┗━┛\nreport\n"


def test_a_status_takes_one_row_of_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    LiveScreen(out).show(status_line(status(120)))
    assert out.getvalue() == "step 120/400  loss 2.4131  lr 2.10e-03  1,812 samples/s  2 w"[:59]


def test_what_the_terminal_cannot_show_is_escaped() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    LiveScreen(out).show("größe ✓")
    assert raw.getvalue() == rb"gr\xf6\xdfe \u2713" + b"\n"
