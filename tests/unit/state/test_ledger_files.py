"""Tests of reading a ledger while its run writes and merges files: each row is read once, and no whole file is called unreadable."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
from ledger_rows import Rows, assert_each_once, numbers

from undula.errors import StorageError
from undula.state import ledger_files
from undula.state.ledger import FILES_PER_TIER, compact, read_ledger
from undula.storage import Store


@dataclass(frozen=True)
class Watched(Store):
    """Store that calls `before` with the name of each file before it is read, and returns what `instead` has for it."""

    before: Callable[[str], object] = lambda name: None
    instead: Callable[[str, bytes], bytes] = lambda name, data: data

    def read(self, name: str) -> bytes:
        self.before(name)
        return self.instead(name, super().read(name))


def is_ledger(name: str) -> bool:
    return name.startswith("ledger/")


def test_files_that_are_merged_while_they_are_read_lose_no_row(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    rows = Rows(store)
    rows.add(2 * FILES_PER_TIER)
    merging, merged = threading.Lock(), []

    def merge(name: str) -> None:
        with merging:
            if not merged:
                merged.append(compact(store))

    assert_each_once(Watched(str(tmp_path), before=merge), rows.count)
    assert merged == [True]
    assert_each_once(store, rows.count)


def test_a_listing_that_misses_files_because_they_are_just_merged_is_repeated(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Torn(Store):
        """Store whose first listing has neither the merged files nor those of their sources that it lists last."""

        listings: list[set[str]] = field(default_factory=list)

        def names(self, folder: str) -> set[str]:
            found = super().names(folder)
            if folder == "ledger" and not self.listings:
                compact(self)
                found = set(sorted(found)[:5])
            self.listings.append(found)
            return found

    rows = Rows(Store(str(tmp_path)))
    rows.add(FILES_PER_TIER)
    assert_each_once(Torn(str(tmp_path)), rows.count)


def test_a_file_of_which_a_part_is_read_is_read_again(tmp_path: Path) -> None:
    Rows(Store(str(tmp_path))).add(3)
    seen: set[str] = set()

    def half_at_first(name: str, data: bytes) -> bytes:
        is_first = name not in seen
        seen.add(name)
        return data[: len(data) // 2] if is_first and is_ledger(name) else data

    assert_each_once(Watched(str(tmp_path), instead=half_at_first), 3)


def test_a_file_that_stays_unreadable_is_named_and_nobody_is_told_to_delete_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    Rows(store).add(3)
    bad = next(entry.name for entry in store.list("ledger") if "steps" in entry.name)
    store.write(bad, store.read(bad)[:-5])
    with pytest.raises(StorageError) as caught:
        read_ledger(store)
    assert f"{store.url}/{bad} cannot be read as a Parquet file" in str(caught.value)
    assert not any(word in str(caught.value) for word in ("delete", "remove", "damaged", "\n"))


def test_a_file_with_other_columns_is_named(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    Rows(store).add(1)
    events = next(entry.name for entry in store.list("ledger") if "events" in entry.name)
    store.write("ledger/steps-000009-other.parquet", store.read(events))
    with pytest.raises(StorageError, match=r"steps-000009-other\.parquet cannot be read .*attempt"):
        read_ledger(store)


def test_a_ledger_that_never_holds_still_is_not_read_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_files, "MOST_LISTINGS", 5)
    rows = Rows(Store(str(tmp_path)))
    rows.add()
    with pytest.raises(StorageError, match="changes faster than it can be read; try again"):
        read_ledger(Watched(str(tmp_path), before=lambda name: rows.add()))


def test_many_files_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_files, "READERS", 8)
    store = Store(str(tmp_path))
    Rows(store).add(8)  # 16 files
    together = threading.Barrier(8, timeout=60)
    assert_each_once(Watched(str(tmp_path), before=lambda name: together.wait() if is_ledger(name) else None), 8)


def test_a_reader_sees_each_row_once_at_any_moment_of_a_run(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    rows = Rows(store)
    has_ended, errors = threading.Event(), []

    def write_and_merge() -> None:
        try:
            for _ in range(15):
                rows.add(5)
                compact(store)
        except Exception as error:
            errors.append(error)
        finally:
            has_ended.set()

    writer = threading.Thread(target=write_and_merge)
    writer.start()
    before = 0
    while not has_ended.is_set():
        steps, events = numbers(read_ledger(store))
        assert steps == list(range(len(steps)))
        assert events == list(range(len(events)))
        assert len(steps) - len(events) in (0, 1)  # a step is written before its event
        assert len(steps) >= before
        before = len(steps)
    writer.join()
    assert not errors
    assert_each_once(store, 75)


def test_rows_of_a_version_with_fewer_columns_are_read(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    Rows(store).add(1)
    old = ledger_files.STEP_SCHEMA.empty_table().drop_columns(["cells", "applied"])
    old = pa.Table.from_pylist([{"attempt": 0, "step": 5, "loss": 2.0}], schema=old.schema)
    store.write("ledger/steps-000000-00000.parquet", ledger_files.to_bytes(old))
    ledger = read_ledger(store)
    assert ledger.replaced["step"].to_pylist() == [5]
    assert ledger.replaced["cells"].to_pylist() == [None]
