"""Tests of the output that a run keeps for `undula logs`."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from undula.driver import kept_output as module
from undula.driver.kept_output import KeptOutput, kept_output
from undula.errors import UnavailableError
from undula.masking.values import declare
from undula.state.directory import OUTPUT, delete_run
from undula.storage import Store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(module, "INTERVAL_S", 0.0)
    return Store(str(tmp_path))


def test_lines_are_kept_without_secrets_and_status_lines(store: Store) -> None:
    declare({"PHRASE": "open-sesame"})
    output = KeptOutput(store)
    output.add(["rank 0: it is open-sesame", "step 1/2  loss 0.5"])
    output.add([])
    output.add(["rank 1: größe \udcff"])
    output.finish("finished: no validation\nrun directory: x")
    output.finish()
    assert kept_output(store).splitlines() == [
        "rank 0: it is ***",
        "rank 1: größe \\udcff",
        "finished: no validation",
        "run directory: x",
    ]


def test_lines_of_workers_and_the_result_are_kept_if_they_come_at_the_same_time(store: Store) -> None:
    output = KeptOutput(store)
    lines = [[f"worker {number}{' ' * 2000}" for number in range(first, first + 50)] for first in range(0, 300, 50)]
    with ThreadPoolExecutor(1) as workers:
        added = workers.submit(lambda: [output.add(each) for each in lines])
        for number in range(20):
            output.finish(f"result {number}")
        added.result()
    output.finish()
    kept = [line.rstrip() for line in kept_output(store).splitlines()]
    assert sorted(kept) == sorted([*(f"worker {n}" for n in range(300)), *(f"result {n}" for n in range(20))])


def test_the_newest_lines_of_the_newest_attempt_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 16)
    monkeypatch.setattr(module, "MOST_PARTS", 2)
    began = iter([10**15, 2 * 10**15])
    monkeypatch.setattr("time.time_ns", lambda: next(began))
    for attempt in ("first", "second"):
        output = KeptOutput(store)
        for number in range(5):
            output.finish(f"{attempt} attempt, line {number}")
    assert kept_output(store).splitlines() == ["second attempt, line 3", "second attempt, line 4"]
    assert len(store.names(OUTPUT)) == 4


def test_an_outage_of_the_storage_loses_no_line_that_a_later_write_has(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(self: Store, name: str, data: bytes) -> None:
        raise UnavailableError("busy")

    output = KeptOutput(store)
    with monkeypatch.context() as outage:
        outage.setattr(Store, "write", unavailable)
        output.finish("a")
    output.finish("b")
    assert kept_output(store) == "a\nb\n"


def test_a_run_without_output_has_none_and_a_deleted_one_neither(store: Store) -> None:
    assert kept_output(store) == ""
    KeptOutput(store).finish("a")
    store.write("job.json", b"{}")
    delete_run(store)
    assert kept_output(store) == ""
