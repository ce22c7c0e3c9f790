"""Tests of requests that fail for a while: they are repeated, and one event says what is being waited for."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from s3_server import PassOn, S3Proxy
from storage_kit import CONFIG, ROLE, use_profile, used

from undula.data.prepare.write import write_shards
from undula.data.stored.manifest import load_manifest
from undula.data.stored.reads import WindowReads
from undula.data.stored.tasks import rows_tasks
from undula.errors import StorageError
from undula.plan.order import EpochOrder
from undula.plan.plan import Plan, PlanSpec
from undula.state.events import StorageEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Outages, Store, Wait, open_store, retries, waits_reported_to, waits_reporter
from undula.storage.s3 import forget_clients
from undula.telemetry.hub import Hub
from undula.telemetry.messages import Line, Message
from undula.telemetry.waits import WaitPublisher

CREDENTIALS = (
    '{"Version": 1, "AccessKeyId": "testing", "SecretAccessKey": "testing", "SessionToken": "t", "Expiration": "%s"}'
)


class Failing(S3Proxy):
    """S3 server, STS and metadata service that refuse requests for a while."""

    def __init__(self, upstream: str):
        super().__init__(upstream, handler=_Failing)
        self.refusals: deque[tuple[int, str]] = deque()
        """Status and code of the answers to the next requests."""
        self.is_off = threading.Event()
        """Refuses all requests while it is set."""
        self.metadata_failures = 0
        """Number of requests to the metadata service that fail next."""


class _Failing(PassOn):
    server: Failing

    def pass_on(self) -> None:
        if self.server.is_off.is_set():
            self._refuse(503, "SlowDown")
        elif self.server.refusals:
            self._refuse(*self.server.refusals.popleft())
        elif self.path.startswith("/latest/"):
            self._metadata()
        elif self.command == "POST" and self.path == "/":
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.answer(200, [("Content-Type", "text/xml")], ROLE.encode())
        else:
            super().pass_on()

    def _metadata(self) -> None:
        body = CREDENTIALS % "2099-01-01T00:00:00Z"
        if self.path.endswith("/security-credentials/"):
            body = "role"
        has_failed = self.server.metadata_failures > 0
        self.server.metadata_failures -= has_failed
        self.answer(500 if has_failed else 200, [], body.replace("SessionToken", "Token").encode())

    def _refuse(self, status: int, code: str) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>" if code else ""
        if self.command == "POST":
            body = f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>m</Message></Error></ErrorResponse>"
        self.answer(status, [("Content-Type", "application/xml")], body.encode())


@pytest.fixture
def server(s3_endpoint: str, s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    with used(Failing(s3_endpoint), monkeypatch) as running:
        yield running


@pytest.fixture
def store(s3: Any, server: Failing) -> Store:
    return open_store(s3.url("root"))


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (520, ""), (500, "InternalError"), (429, "")])
def test_busy_servers_are_asked_again_by_every_operation(store: Store, server: Failing, status: int, code: str) -> None:
    operations: list[tuple[Callable[[], object], object]] = [
        (lambda: store.write("file", b"1"), None),
        (lambda: store.read("file"), b"1"),
        (lambda: [entry.name for entry in store.list()], ["file"]),
        (lambda: store.exists("file"), True),
        (lambda: store.create("other", b"1"), True),
    ]
    for operation, expected in operations:
        server.refusals.extend([(status, code)] * 3)
        assert operation() == expected
        assert not server.refusals


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (501, "NotImplemented"), (400, "InvalidRequest")])
def test_a_final_refusal_is_not_repeated(store: Store, server: Failing, status: int, code: str) -> None:
    server.refusals.extend([(status, code)] * 2)
    with pytest.raises(StorageError, match=f"^cannot read {store.url}/file: .*{code}"):
        store.read("file")
    assert len(server.refusals) == 1


def test_the_last_failure_is_raised_at_the_time_limit(
    store: Store, server: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_FOR_S", 0.2)
    server.is_off.set()
    with pytest.raises(StorageError, match=r"^cannot read .*: .*SlowDown"):
        store.read("file")


def test_throttled_sts_is_asked_again(
    store: Store, server: Failing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("file", b"1")
    (tmp_path / "config").write_text(CONFIG)
    use_profile("role", tmp_path / "config", monkeypatch)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of botocore for STS, which would wait for seconds
    server.refusals.extend([(400, "ThrottlingException")] * 3)
    assert open_store(store.url).read("file") == b"1"
    assert not server.refusals


def test_credentials_that_cannot_be_refreshed_are_asked_for_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The credentials of a process expire at once, so that each request has to refresh them."""
    store.write("file", b"1")
    failures = tmp_path / "failures"
    failures.write_text("0")
    (tmp_path / "credentials.py").write_text(
        "import datetime, pathlib, sys\n"
        f"file = pathlib.Path({str(failures)!r})\n"
        "left = int(file.read_text())\n"
        "file.write_text(str(max(left - 1, 0)))\n"
        "now = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=30)\n"
        f"sys.exit('no token') if left else print({CREDENTIALS!r} % now.isoformat())\n"
    )
    command = f"credential_process = {sys.executable} {tmp_path / 'credentials.py'}"
    (tmp_path / "config").write_text(f"[profile process]\n{command}\n")
    use_profile("process", tmp_path / "config", monkeypatch)
    store = open_store(store.url)
    failures.write_text("3")
    assert store.read("file") == b"1"
    assert failures.read_text() == "0"


def test_missing_credentials_are_refused_at_the_start_and_waited_for_later(
    store: Store, server: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that starts in the middle of a run may find that the metadata service does not answer."""
    store.write("file", b"1")
    use_profile(None, Path("/nowhere"), monkeypatch)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url)
    open_store(store.url)
    forget_clients()
    server.metadata_failures = 1_000_000
    with pytest.raises(StorageError, match="no AWS credentials were found"):
        open_store(store.url)
    server.metadata_failures = 6
    assert store.read("file") == b"1"
    assert server.metadata_failures == 0


def test_failures_belong_to_one_outage_until_there_was_none_for_a_while() -> None:
    outages = Outages()
    assert [outages.begins("s3://a", now) for now in (0, 1, 60, 119, 180)] == [True, False, False, False, True]
    assert outages.begins("s3://b", 180)


@pytest.fixture
def waits(server: Failing, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Wait]]:
    """Reports of a server that is up again as soon as its outage was reported."""
    monkeypatch.setattr(retries, "REPORT_AFTER_S", 0.05)
    reports: list[Wait] = []

    def report(wait: Wait) -> None:
        reports.append(wait)
        server.is_off.clear()

    with waits_reported_to(report):
        yield reports
        assert waits_reporter() is report
    assert waits_reporter() is None


def test_one_report_is_made_of_an_outage_that_many_requests_meet(
    store: Store, server: Failing, waits: list[Wait]
) -> None:
    store.write("file", b"1")
    server.is_off.set()
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(store.read, ["file"] * 8)) == [b"1"] * 8
    (wait,) = waits
    assert store.url.startswith(wait.place)
    assert wait.problem == "503 SlowDown (GetObject)"


def test_a_single_refusal_is_not_reported(
    store: Store, server: Failing, waits: list[Wait], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "REPORT_AFTER_S", 30.0)  # a busy machine can take long for one request
    server.refusals.append((503, "SlowDown"))
    store.write("file", b"1")
    assert not waits


def test_a_read_task_reports_to_the_process_that_wants_the_rows(
    store: Store, server: Failing, waits: list[Wait]
) -> None:
    write_shards(store, [pa.table({"a": range(8)})], pa.schema([("a", pa.int64())]), 8, num_shards=1)
    manifest = load_manifest(store.url)
    order = EpochOrder(Plan(PlanSpec(global_batch=2, virtual_workers=1), 8), manifest.row_counts, 0)
    reads = [WindowReads(manifest, manifest.columns).of(window) for window in order.windows(0)]
    (task,) = rows_tasks(reads, task_bytes=2**20)
    with waits_reported_to(None):  # as in the process that runs the task
        server.is_off.set()
        assert sum(table.num_rows for table in task()) == 8
    assert len(waits) == 1


def test_the_hub_records_an_outage_once_although_its_own_store_is_down(
    store: Store, server: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_FOR_S", 0.1)
    monkeypatch.setattr("undula.telemetry.waits.RETRY_INTERVAL_S", 0.01)
    hub = Hub(store)
    server.is_off.set()
    published: list[Message] = []

    def publish(message: Message) -> None:
        published.append(message)
        hub.publish(message)

    for rank in range(4):
        WaitPublisher(publish)(Wait("s3://data", f"503 SlowDown (GetObject) on rank {rank}", 120.0))
    hub.publish(Line(0, "text"))
    assert [type(message) for message in hub.read(0)[1]] == [StorageEvent, Line]
    server.is_off.clear()
    (event,) = until_recorded(store)
    assert event == published[0]


def until_recorded(store: Store, limit_s: float = 60.0) -> list[StorageEvent]:
    deadline = time.monotonic() + limit_s
    while not (found := events_of(read_ledger(store).events, StorageEvent)):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # between two looks
    return found
