"""Tests of W&B with offline files: each step is there once after a killed driver, and nothing else of the driver is."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_rows import Rows
from trackers_kit import RUN, values_by_step

from undula.errors import SpecError
from undula.storage import Store
from undula.telemetry.tracker import TrackedStep
from undula.telemetry.trackers.wandb import (
    BLOCK_BYTES,
    HEADER_BYTES,
    RECORD_HEADER,
    WandbSpec,
    WandbTracker,
    history_steps,
    newest_step,
    records,
)

OFFLINE = WandbSpec(mode="offline")
DRIVER = """
import sys, threading
from trackers_kit import Followed
from undula.storage import Store
from undula.telemetry.trackers.wandb import WandbSpec, WandbTracker

store = Store(sys.argv[1])
followed = Followed(store, WandbTracker(WandbSpec(mode="offline"), store))
if sys.argv[2] == "end":
    sys.exit(not followed.end(200) or bool(followed.reports))
while (followed.follower.newest or 0) < int(sys.argv[2]):
    threading.Event().wait(0.05)
print("sent", flush=True)
threading.Event().wait()
"""


def test_each_step_is_in_the_files_once_and_in_order_after_a_kill_and_a_resubmission(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    rows = Rows(Store(str(tmp_path)))
    rows.add(61)
    command = [sys.executable, "-c", DRIVER, str(tmp_path), "60", "--planted-secret-4711"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "sent\n"
        driver.send_signal(signal.SIGKILL)
    rows.add(20)
    subprocess.run([sys.executable, "-c", DRIVER, str(tmp_path), "end"], check=True, timeout=250)

    found = values_by_step(tmp_path / "trackers")
    assert [step for step, _ in found] == list(range(1, 82))
    assert all(values["loss/train"] == 1.0 and values["_timestamp"] == 0.0 for _, values in found)
    content = b"".join(file.read_bytes() for file in (tmp_path / "trackers").rglob("*") if file.is_file())
    assert b"0123abcd" in content
    assert b"job.workers.max" in content
    assert b"planted-secret-4711" not in content


def test_a_tracker_that_is_opened_again_goes_on_after_its_newest_step(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    tracker = WandbTracker(OFFLINE, Store(str(tmp_path)))
    assert tracker.open(RUN) is None
    tracker.send([TrackedStep(step, 10.0 + step, {"loss/train": float("nan")}) for step in (0, 1, 2)])
    assert tracker.open(RUN) == 2
    tracker.send([TrackedStep(3, 13.0, {"loss/train": 1.0})])
    tracker.close("finished")
    assert [step for step, _ in values_by_step(tmp_path / "trackers")] == [0, 1, 2, 3]


def part(kind: int, content: bytes) -> bytes:
    return RECORD_HEADER.pack(0, len(content), kind) + content


def test_records_are_read_across_blocks_and_up_to_a_torn_end() -> None:
    full, first, middle, last = 1, 2, 3, 4
    size = BLOCK_BYTES - HEADER_BYTES - RECORD_HEADER.size
    start = b"h" * HEADER_BYTES + part(first, b"a" * size)
    block = part(middle, b"b" * (BLOCK_BYTES - RECORD_HEADER.size))
    end = part(last, b"c") + part(full, b"whole")
    whole = b"a" * size + b"b" * (BLOCK_BYTES - RECORD_HEADER.size) + b"c"
    assert list(records(start + block + end, HEADER_BYTES)) == [whole, b"whole"]
    assert list(records(block + end, 0)) == [b"whole"]
    for torn in (1, 4, 5, len(part(full, b"whole"))):
        assert list(records((start + block + end)[:-torn], HEADER_BYTES)) == [whole]
    padded = b"h" * HEADER_BYTES + part(full, b"d" * (size - 3)) + b"\0" * 3 + part(full, b"next")
    assert list(records(padded, HEADER_BYTES)) == [b"d" * (size - 3), b"next"]


def test_the_newest_step_is_found_at_the_end_of_a_long_file(tmp_path: Path) -> None:
    record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record()
    record.history.step.num = 7
    file = tmp_path / "wandb" / "offline-run-20260101_000000-0123abcd" / "run-0123abcd.wandb"
    file.parent.mkdir(parents=True)
    empty = part(1, b"")
    block = empty * (BLOCK_BYTES // len(empty))
    first = b"h" * HEADER_BYTES + part(1, record.SerializeToString())
    first += empty * ((BLOCK_BYTES - len(first)) // len(empty))
    file.write_bytes(b"".join(each.ljust(BLOCK_BYTES, b"\0") for each in (first, *40 * [block])))
    assert history_steps(file, BLOCK_BYTES) == []
    assert newest_step(tmp_path, "0123abcd") == 7
    assert newest_step(tmp_path, "another") is None


def test_missing_credentials_and_a_missing_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    store, on_s3 = Store(str(tmp_path)), Store("s3://bucket/run")
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(SpecError, match=r"^mode is online, but the job has no key for W&B; give it one with --secret"):
        WandbTracker(WandbSpec(), store).check()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123\n")
    WandbTracker(WandbSpec(), store).check()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    with pytest.raises(SpecError, match="has no key"):
        WandbTracker(WandbSpec(), store).check()
    monkeypatch.setenv("WANDB_API_KEY", "0123")
    WandbTracker(WandbSpec(), store).check()
    WandbTracker(OFFLINE, store).check()
    with pytest.raises(SpecError, match=r"^folder is missing, and W&B cannot write its files to S3"):
        WandbTracker(OFFLINE, on_s3).check()
    WandbTracker(WandbSpec(mode="offline", folder="/tmp"), on_s3).check()
