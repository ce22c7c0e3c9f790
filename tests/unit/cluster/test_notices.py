"""Tests of notices, read from a metadata server on this machine, and of the watcher with servers that misbehave."""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from undula.cluster.notices import Aws, Azure, File, Gcp, Notice, Source, Unreadable, source_here
from undula.cluster.watcher import RETRY_S, SourceOrSignal, watch
from undula.errors import ClusterError
from undula.testing.metadata import MetadataServer, metadata_server


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with metadata_server() as running:
        yield running


SOURCES = {"aws": Aws, "gcp": Gcp, "azure": Azure}


@pytest.mark.parametrize("cloud", SOURCES)
def test_a_notice_is_read_with_its_deadline(server: MetadataServer, cloud: str) -> None:
    source: Source = SOURCES[cloud](server.url)
    assert source.poll() is None
    server.give_notice(30)
    notice = source.poll()
    assert notice is not None
    assert notice.deadline == pytest.approx(time.time() + 30, abs=2)  # clouds announce whole seconds


def test_an_expired_token_is_renewed(server: MetadataServer) -> None:
    source = Aws(server.url)
    assert source.poll() is None
    server.end_tokens()
    assert source.poll() is None
    assert server.requests.count("/latest/api/token") == 2


def test_a_rebalance_recommendation_is_a_notice_only_on_request(server: MetadataServer) -> None:
    server.recommend_rebalance()
    assert Aws(server.url).poll() is None
    notice = Aws(server.url, with_rebalance=True).poll()
    assert notice is not None
    assert notice.deadline is None


def test_a_notice_of_google_cloud_is_read_when_the_server_delays_its_answer(server: MetadataServer) -> None:
    source = Gcp(server.url)
    assert source.poll() is None
    threading.Timer(0.5, server.give_notice, [30]).start()
    began = time.monotonic()
    assert source.poll() is not None
    assert time.monotonic() - began > 0.4
    assert len(server.requests) == 2
    (wait_s,) = re.findall(r"timeout_sec=(\d+)", server.requests[1])
    assert int(wait_s) <= 5, "a signal is only handled after the answer, and a notice is 30 s"


@pytest.mark.parametrize("cloud", SOURCES)
@pytest.mark.parametrize("fault", [500, 403, "garbage", "hang up"])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_undocumented_answer_is_unreadable_and_the_next_poll_finds_the_notice(
    server: MetadataServer, cloud: str, fault: int | str, is_first: bool
) -> None:
    """The first answer of a cloud is a token or the machine's name."""
    source: Source = SOURCES[cloud](server.url)
    if not is_first:
        source.poll()
    server.give_notice(30)
    server.faults.append(fault)
    with pytest.raises(Unreadable):
        source.poll()
    assert source.poll() is not None


EVENT = '{"Events": [{"EventType": "Preempt", "Resources": %s, "NotBefore": %s}]}'


@pytest.mark.parametrize(
    ("cloud", "body"),
    [
        ("aws", '{"action": "terminate", "time": 7}'),
        ("aws", '{"action": "terminate", "time": "9999-12-31T23:59:59-23:59"}'),
        ("azure", '{"Events": 5}'),
        ("azure", '{"Events": ["x"]}'),
        ("azure", EVENT % ("null", '""')),
        ("azure", EVENT % ("[7]", '""')),
        ("azure", EVENT % ('["worker-7"]', "7")),
        ("azure", EVENT % ('["worker-7"]', '"Mon, 19 Sep 99999 18:29:47 GMT"')),
        ("azure", "[" * 100_000),
    ],
)
def test_fields_of_a_wrong_type_are_unreadable(server: MetadataServer, cloud: str, body: str) -> None:
    source: Source = SOURCES[cloud](server.url)
    source.poll()
    server.faults.append(body.encode())
    with pytest.raises(Unreadable):
        source.poll()
    assert source.poll() is None


@pytest.mark.parametrize(
    "content",
    [
        b'{"deadline_s": "soon"}',
        b'{"deadline_s": 1e999}',
        b'{"deadline": null}',
        b'{"deadline": NaN}',
        b'{"deadline": [1]}',
        b'{"deadline": -7}',
        b'{"deadline": 1%s}' % (b"0" * 400),
        b'\xff{"deadline": 7}',
        b"{" * 100_000,
    ],
)
def test_a_file_with_an_invalid_deadline_is_unreadable(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "notice").write_bytes(content)
    with pytest.raises(Unreadable):
        File(tmp_path / "notice").poll()


def test_a_file_is_a_notice_with_or_without_a_deadline(tmp_path: Path) -> None:
    source = File(tmp_path / "notice")
    assert source.poll() is None
    (tmp_path / "notice").write_text("")
    assert source.poll() == Notice(f"the file {tmp_path}/notice exists", None)
    (tmp_path / "notice").write_text(json.dumps({"deadline_s": 30}))
    notice = source.poll()
    assert notice is not None
    assert notice.deadline == pytest.approx(time.time() + 30, abs=5)


def test_the_cloud_is_detected_from_the_firmware(tmp_path: Path) -> None:
    vendor = tmp_path / "sys_vendor"
    vendor.write_text("Amazon EC2\n")
    assert isinstance(source_here(vendor), Aws)
    vendor.write_text("Xen\n")
    with pytest.raises(ClusterError, match="vendor is Xen"):
        source_here(vendor)
    vendor.with_name("bios_version").write_text("4.11.amazon\n")
    assert isinstance(source_here(vendor), Aws)
    vendor.write_text("QEMU\n")
    with pytest.raises(ClusterError, match=r"vendor is QEMU.*--source to one of aws, gcp, azure or file:PATH"):
        source_here(vendor)


class Watched:
    """Watch over a number of polls, with its log lines and the notices that Ray accepted."""

    def __init__(self, source: Source, polls: int, refusals: int = 0):
        self.lines: list[str] = []
        self.drained: list[Notice] = []
        self.pauses_s: list[float] = []
        self.polls = polls
        self.refusals = refusals
        watch(source, self.drain, self.lines.append, self.is_over)

    def drain(self, notice: Notice) -> list[str]:
        if self.refusals:
            self.refusals -= 1
            raise ClusterError("no head")
        self.drained.append(notice)
        return ["0123456789abcdef"]

    def is_over(self, pause_s: float) -> bool:
        self.pauses_s.append(pause_s)
        self.polls -= 1
        return self.polls < 0


def test_the_watcher_logs_each_change_of_state_once(server: MetadataServer) -> None:
    server.faults += [500, "garbage", "hang up", 401, 401, 503]
    watched = Watched(Aws(server.url), polls=12)
    assert [line.split(" AWS")[0] for line in watched.lines] == ["cannot read", "watching"]
    assert not watched.drained


def test_a_slow_or_absent_server_is_logged_once(server: MetadataServer) -> None:
    server.slow_s = 2.5
    server.faults += ["slow"] * 2
    watched = Watched(Aws(server.url), polls=3)
    assert "no answer within 2 s" in watched.lines[0]
    assert len(watched.lines) == 2
    absent = Watched(Aws("http://127.0.0.1:9"), polls=5)
    assert len(absent.lines) == 1


def test_a_notice_is_passed_on_until_ray_accepts_it_and_then_no_more(server: MetadataServer) -> None:
    server.give_notice(100)
    watched = Watched(Aws(server.url), polls=8, refusals=3)
    assert len(watched.drained) == 1
    assert watched.lines[0].startswith("AWS will terminate this instance in ")
    assert "(no head)" in watched.lines[0]
    assert watched.lines[1].endswith("Ray drains 01234567")
    assert len(watched.lines) == 2


def test_a_pending_notice_keeps_its_deadline_and_the_source_is_not_polled(server: MetadataServer) -> None:
    """Google's server delays its next answer, and each poll would restart the 30 s of the notice."""
    server.give_notice(30)
    began = time.time()
    watched = Watched(Gcp(server.url), polls=4, refusals=3)
    assert len(server.requests) == 1
    assert watched.pauses_s[1:4] == [RETRY_S] * 3
    (notice,) = watched.drained
    assert notice.deadline == pytest.approx(began + 30, abs=0.5)
    assert len(watched.lines) == 2


def test_a_notice_that_is_withdrawn_before_ray_accepts_it_is_not_passed_on(tmp_path: Path) -> None:
    class Withdrawn(File):
        def poll(self) -> Notice | None:
            notice = super().poll()
            (tmp_path / "notice").unlink(missing_ok=True)
            return notice

    (tmp_path / "notice").touch()
    watched = Watched(Withdrawn(tmp_path / "notice"), polls=3, refusals=1)
    assert not watched.drained
    assert watched.lines[-1].startswith("watching")


def test_a_deadline_is_passed_on_after_a_recommendation(server: MetadataServer) -> None:
    server.recommend_rebalance()

    class GivesNoticeLater(Aws):
        polls = 0

        def poll(self) -> Notice | None:
            self.polls += 1
            if self.polls == 3:
                server.give_notice(100)
            return super().poll()

    watched = Watched(GivesNoticeLater(server.url, with_rebalance=True), polls=6)
    assert [notice.deadline is None for notice in watched.drained] == [True, False]


def test_a_signal_is_a_notice(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        source = SourceOrSignal(File(tmp_path / "none"), notice_s=60)
        assert source.poll() is None
        signal.raise_signal(signal.SIGUSR1)
        assert not source.wait(30)
        notice = source.poll()
        assert notice is not None
        assert notice.deadline == pytest.approx(time.time() + 60, abs=5)
    finally:
        signal.signal(signal.SIGUSR1, before)
