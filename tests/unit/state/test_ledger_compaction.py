"""Tests of compaction: a ledger has few files however long the run is, and no interruption loses or doubles a row."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ledger_rows import Rows, assert_each_once, step_row

from undula.errors import StorageError
from undula.state import ledger
from undula.state import ledger as ledger_module
from undula.state.events import EndEvent
from undula.state.ledger import (
    FILES_PER_TIER,
    MOST_SOURCES,
    TIERS_BYTES,
    EventWriter,
    LedgerWriter,
    RowWriter,
    compact,
    due_merge,
    read_ledger,
)
from undula.state.ledger_files import EVENTS, STEPS
from undula.storage import Entry, Store


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of files of a tier from which on they are merged, in tests that would take long with many files."""
    monkeypatch.setattr(ledger, "FILES_PER_TIER", 3)
    return 3


def sizes(*num_bytes: int) -> list[Entry]:
    return [Entry(f"steps-{number:08d}.parquet", each, "") for number, each in enumerate(num_bytes)]


def names(store: Store) -> list[str]:
    return [entry.name for entry in store.list("ledger")]


def test_few_or_large_files_are_left_alone() -> None:
    assert due_merge(sizes(*[10_000] * (FILES_PER_TIER - 1))) == ()
    assert due_merge(sizes(*[TIERS_BYTES[-1]] * 100)) == ()
    assert due_merge([]) == ()


def test_files_of_a_size_are_merged_smallest_first() -> None:
    files = sizes(*range(20_000, 20_000 + FILES_PER_TIER), 70_000, 2)
    assert due_merge(files) == tuple(file.name for file in (files[-1], *files[:-2]))


def test_a_merge_is_bounded_in_files_and_bytes() -> None:
    assert len(due_merge(sizes(*[10] * 2000))) == MOST_SOURCES
    assert due_merge(sizes(*[TIERS_BYTES[-1] - 1] * 50)) == tuple(file.name for file in sizes(0, 0))


def test_a_run_of_a_million_steps_has_few_files_and_copies_a_row_a_few_times() -> None:
    """A flush adds a file of 50 rows, with 8 KiB for the columns and 80 bytes a row."""
    header, flush_bytes = 8 * 2**10, 50 * 80
    files: dict[str, int] = {}
    copied = most = 0
    for number in range(20_000):
        files[f"steps-{number:08d}"] = header + flush_bytes
        sources = due_merge([Entry(name, num_bytes, "") for name, num_bytes in files.items()])
        if sources:
            rows = sum(files.pop(name) - header for name in sources)
            files[f"steps-merged-{number:08d}"] = header + rows
            copied += rows
        most = max(most, len(files))
    assert sum(num_bytes - header for num_bytes in files.values()) == 20_000 * flush_bytes
    assert most <= 3 * FILES_PER_TIER
    assert copied <= 5 * 20_000 * flush_bytes


def test_all_rows_are_in_one_file_of_each_kind_afterwards(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for attempt in range(FILES_PER_TIER):
        Rows(store, attempt).add()
    before = read_ledger(store)
    assert compact(store)
    assert [name.rpartition("-")[0] for name in names(store)] == [
        "ledger/events-merged-00000001",
        "ledger/steps-merged-00000001",
    ]
    after = read_ledger(store)
    assert (after.steps, after.replaced, after.events) == (before.steps, before.replaced, before.events)
    assert not compact(store)


def test_merged_files_sort_after_all_others(tmp_path: Path, few: int) -> None:
    """So a listing in pages, which may see a source that is deleted meanwhile, also sees the file with its rows."""
    store = Store(str(tmp_path))
    controller = EventWriter(store, "controller")
    rows, seen = Rows(store), set[str]()
    for _ in range(11):
        rows.add(few - 1)
        controller.event(EndEvent())
        seen |= set(names(store))
        if compact(store):
            new = set(names(store)) - seen
            assert all(name > other for name in new for other in seen if other.split("-")[0] == name.split("-")[0])
            seen |= new
    assert any("events-merged-00000010-" in name for name in seen)


class DiedError(Exception):
    """Death of the process."""


@dataclass(frozen=True)
class Dying(Store):
    """Store of a process that dies instead of its `left`-th change, or right after it."""

    left: list[int] = field(default_factory=list)

    def _change(self) -> None:
        if self.left[0] == 0:
            raise DiedError
        self.left[0] -= 1

    def write(self, name: str, data: bytes) -> None:
        self._change()
        super().write(name, data)

    def delete(self, name: str) -> None:
        self._change()
        super().delete(name)


def test_a_death_between_any_two_changes_loses_and_doubles_nothing(tmp_path: Path, few: int) -> None:
    deaths = 0
    for changes in range(2 * (few + 1) + 1):
        store = Dying(str(tmp_path / str(changes)), left=[changes])
        rows = Rows(Store(store.url))
        rows.add(few)
        try:
            compact(store)
        except DiedError:
            deaths += 1
        assert_each_once(Store(store.url), few)
        rows.add(few)
        while compact(Store(store.url)):
            assert_each_once(Store(store.url), 2 * few)
    assert deaths == 2 * (few + 1)  # a merged file is written, and its sources are deleted, for each kind


def test_two_processes_that_merge_at_once_do_no_harm(tmp_path: Path, few: int) -> None:
    store = Store(str(tmp_path))
    rows = Rows(store)
    rows.add(few)
    others = []

    class Other(Store):
        def write(self, name: str, data: bytes) -> None:
            others.append(compact(store))
            super().write(name, data)
            assert_each_once(store, few)

    assert compact(Other(str(tmp_path)))
    assert others[0]
    assert_each_once(store, few)
    rows.add(few)
    while compact(store):
        assert_each_once(store, 2 * few)


def test_a_file_that_cannot_be_read_is_left_alone(tmp_path: Path, few: int) -> None:
    store = Store(str(tmp_path))
    Rows(store).add(few)
    bad = next(name for name in names(store) if "steps" in name)
    content = store.read(bad)
    store.write(bad, b"not all of it is there")
    compact(store)
    assert bad in names(store)
    store.write(bad, content)
    assert_each_once(store, few)


def test_rows_whose_write_seemed_to_fail_count_once_although_they_were_merged_before_the_second_write(
    tmp_path: Path, few: int
) -> None:
    may_fail = [True]

    class Unsure(Store):
        def write(self, name: str, data: bytes) -> None:
            super().write(name, data)
            if may_fail.pop() if may_fail else False:
                raise StorageError("no answer")

    writer = RowWriter(Unsure(str(tmp_path)), EVENTS, "000000")
    writer.append({"time": 0.0, "kind": "first", "data": "{}"})
    with pytest.raises(StorageError):
        writer.flush()
    store = Store(str(tmp_path))
    Rows(store).add(few)
    assert compact(store)
    writer.append({"time": 1.0, "kind": "second", "data": "{}"})
    writer.flush()
    kinds = read_ledger(store).events["kind"].to_pylist()
    assert [kind for kind in kinds if kind != "loss"] == ["first", "second"]


def test_a_run_compacts_its_ledger_from_time_to_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "FLUSH_INTERVAL_S", 0.01)
    store = Store(str(tmp_path))
    former = Rows(store)
    former.add(2 * FILES_PER_TIER)
    writer = LedgerWriter(store, 2)
    deadline = time.monotonic() + 60
    for step in range(former.count, former.count + 2 * FILES_PER_TIER):
        writer.step(step_row(2, step))
        writer.flush()
    while len(names(store)) > FILES_PER_TIER:
        assert time.monotonic() < deadline
        writer.step(step_row(2, writer.stored_steps))
        writer.flush()
        time.sleep(0.01)
    steps = writer.stored_steps
    writer.close()
    assert read_ledger(store).steps["step"].to_pylist() == list(range(steps))
    assert any(STEPS.includes(name.removeprefix("ledger/")) and "merged" in name for name in names(store))
