"""Notices as clouds give them, from a metadata server of this machine, and the watcher before servers that do not behave."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from undula.cluster.notices import Aws, Azure, File, Gcp, Notice, Source, Unreadable, source_here
from undula.cluster.watcher import RETRY_S, OrSignal, watch
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
    assert notice.deadline == pytest.approx(time.time() + 30, abs=2)  # the clouds tell whole seconds


def test_a_token_that_has_ended_is_renewed(server: MetadataServer) -> None:
    source = Aws(server.url)
    assert source.poll() is None
    server.end_tokens()
    assert source.poll() is None
    assert server.requests.count("/latest/api/token") == 2


def test_a_rebalance_is_a_notice_where_it_is_asked_for(server: MetadataServer) -> None:
    server.recommend_rebalance()
    assert Aws(server.url).poll() is None
    notice = Aws(server.url, with_rebalance=True).poll()
    assert notice is not None
    assert notice.deadline is None


def test_google_holds_its_answer_back_until_it_changes(server: MetadataServer) -> None:
    source = Gcp(server.url)
    assert source.poll() is None
    threading.Timer(0.5, server.give_notice, [30]).start()
    began = time.monotonic()
    assert source.poll() is not None
    assert time.monotonic() - began > 0.4
    assert len(server.requests) == 2
    (wait_s,) = re.findall(r"timeout_sec=(\d+)", server.requests[1])
    assert int(wait_s) <= 5, "a signal is a notice of 30 s, and not looked at before"


@pytest.mark.parametrize("cloud", SOURCES)
@pytest.mark.parametrize("fault", [500, 403, "garbage", "hang up"])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_answer_that_the_cloud_does_not_document_is_no_notice_and_no_silence(
    server: MetadataServer, cloud: str, fault: int | str, is_first: bool
) -> None:
    """The first answers are a token, or a machine's name."""
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
def test_fields_of_another_kind_are_no_notice_and_no_end_of_the_watch(
    server: MetadataServer, cloud: str, body: str
) -> None:
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
def test_a_file_whose_deadline_is_none_is_unreadable(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "notice").write_bytes(content)
    with pytest.raises(Unreadable):
        File(tmp_path / "notice").poll()


def test_a_file_is_a_notice_with_or_without_a_deadline(tmp_path: Path) -> None:
    source = File(tmp_path / "notice")
    assert source.poll() is None
    (tmp_path / "notice").write_text("")
    assert source.poll() == Notice(f"{tmp_path}/notice is there", None)
    (tmp_path / "notice").write_text(json.dumps({"deadline_s": 30}))
    notice = source.poll()
    assert notice is not None
    assert notice.deadline == pytest.approx(time.time() + 30, abs=5)


def test_the_cloud_is_known_by_its_firmware(tmp_path: Path) -> None:
    vendor = tmp_path / "sys_vendor"
    vendor.write_text("Amazon EC2\n")
    assert isinstance(source_here(vendor), Aws)
    vendor.write_text("QEMU\n")
    with pytest.raises(ClusterError, match=r"its vendor is QEMU.*--source aws, gcp, azure or file:PATH"):
        source_here(vendor)


class Watched:
    """A watch over a number of looks, with what it told and what Ray was told."""

    def __init__(self, source: Source, looks: int, refusals: int = 0):
        self.lines: list[str] = []
        self.drained: list[Notice] = []
        self.pauses_s: list[float] = []
        self.looks = looks
        self.refusals = refusals
        watch(source, self.drain, self.lines.append, self.is_over)

    def drain(self, notice: Notice) -> list[str]:
        if self.refusals:
            self.refusals -= 1
            raise ClusterError("no head there")
        self.drained.append(notice)
        return ["0123456789abcdef"]

    def is_over(self, pause_s: float) -> bool:
        self.pauses_s.append(pause_s)
        self.looks -= 1
        return self.looks < 0


def test_a_line_for_each_change_of_state_whatever_the_server_does(server: MetadataServer) -> None:
    server.faults += [500, "garbage", "hang up", 401, 401, 503]
    watched = Watched(Aws(server.url), looks=12)
    assert [line.split(" AWS")[0] for line in watched.lines] == ["cannot read", "watching"]
    assert not watched.drained


def test_a_server_that_is_slow_or_not_there_is_told_once(server: MetadataServer) -> None:
    server.slow_s = 2.5
    server.faults += ["slow"] * 2
    watched = Watched(Aws(server.url), looks=3)
    assert "no answer within 2 s" in watched.lines[0]
    assert len(watched.lines) == 2
    absent = Watched(Aws("http://127.0.0.1:9"), looks=5)
    assert len(absent.lines) == 1


def test_ray_is_told_once_and_until_it_has_it(server: MetadataServer) -> None:
    server.give_notice(100)
    watched = Watched(Aws(server.url), looks=8, refusals=3)
    assert len(watched.drained) == 1
    assert watched.lines[0].startswith("AWS will terminate this instance in ")
    assert "Ray does not know yet (no head there)" in watched.lines[0]
    assert watched.lines[1].endswith("Ray drains 01234567")
    assert len(watched.lines) == 2


def test_a_notice_that_ray_has_not_is_passed_on_as_it_came_without_another_look(server: MetadataServer) -> None:
    """Google's server holds the next answer back, and of its notice of 30 s each look would make one of 30 s more."""
    server.give_notice(30)
    began = time.time()
    watched = Watched(Gcp(server.url), looks=4, refusals=3)
    assert len(server.requests) == 1
    assert watched.pauses_s[1:4] == [RETRY_S] * 3
    (notice,) = watched.drained
    assert notice.deadline == pytest.approx(began + 30, abs=0.5)
    assert len(watched.lines) == 2


def test_a_notice_that_is_withdrawn_before_ray_has_it_is_not_passed_on(tmp_path: Path) -> None:
    class Withdrawn(File):
        def poll(self) -> Notice | None:
            found = super().poll()
            (tmp_path / "notice").unlink(missing_ok=True)
            return found

    (tmp_path / "notice").touch()
    watched = Watched(Withdrawn(tmp_path / "notice"), looks=3, refusals=1)
    assert not watched.drained
    assert watched.lines[-1].startswith("watching")


def test_a_deadline_that_comes_after_an_advice_is_passed_on_as_well(server: MetadataServer) -> None:
    server.recommend_rebalance()

    class GivesNoticeLater(Aws):
        looks = 0

        def poll(self) -> Notice | None:
            self.looks += 1
            if self.looks == 3:
                server.give_notice(100)
            return super().poll()

    watched = Watched(GivesNoticeLater(server.url, with_rebalance=True), looks=6)
    assert [notice.deadline is None for notice in watched.drained] == [True, False]


def test_a_signal_is_a_notice(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        source = OrSignal(File(tmp_path / "none"), notice_s=60)
        assert source.poll() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not source.wait(30)
        notice = source.poll()
        assert notice is not None
        assert notice.deadline == pytest.approx(time.time() + 60, abs=5)
    finally:
        signal.signal(signal.SIGUSR1, before)
