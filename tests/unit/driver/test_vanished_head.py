"""Tests of following a job whose head vanishes without closing a connection, with a fake job API in a process that is stopped."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray.job_submission import JobStatus

from undula.cluster.local import free_ports, job_api_answers
from undula.driver import follow, submit
from undula.errors import ClusterError
from undula.state.processes import send_signal

SERVER = """
import asyncio, sys
from pathlib import Path
from aiohttp import web

port, end = int(sys.argv[1]), Path(sys.argv[2])
tails = []

async def version(request):
    return web.json_response({"ray_version": "2.60.0", "version": "4"})

async def job(request):
    status = "SUCCEEDED" if end.exists() else "RUNNING"
    return web.json_response({"type": "SUBMISSION", "submission_id": "job", "status": status, "entrypoint": "python"})

async def tail(request):
    tails.append(1)
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    await socket.send_str("line 0\\nli")
    while len(tails) == 1 or not end.exists():  # the first connection never carries anything more
        await asyncio.sleep(0.02)
    await socket.send_str("ne 1\\nline 2\\n")
    return socket

app = web.Application()
app.add_routes([web.get("/api/version", version), web.get("/api/jobs/job", job), web.get("/api/jobs/job/logs/tail", tail)])
web.run_app(app, host="127.0.0.1", port=port, print=None)
"""


@dataclass
class Head:
    """Head with one job, which ends when the file `end` exists."""

    url: str
    process: "subprocess.Popen[bytes]"
    end: Path


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    for name, limit_s in {"PROBE_S": 0.2, "LAST_LINES_S": 0.2, "RECONNECT_S": 0.1}.items():
        monkeypatch.setattr(follow, name, limit_s)
    monkeypatch.setattr(submit, "ANSWER_TIMEOUT_S", 2.0)
    (port,) = free_ports(1)
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port), str(tmp_path / "end")])
    url = f"http://127.0.0.1:{port}"
    while not job_api_answers(url):
        assert process.poll() is None
    yield Head(url, process, tmp_path / "end")
    process.kill()
    process.wait()


@pytest.mark.timeout(60)
def test_a_head_that_vanishes_without_a_word_is_noticed_and_followed_again(head: Head) -> None:
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if line == "line 0":
            send_signal(head.process, signal.SIGSTOP)
        if line.startswith("lost the connection"):
            head.end.touch()
            send_signal(head.process, signal.SIGCONT)

    details = follow.follow_to_the_end(submit.connect(head.url), "job", show, forever=True)
    assert details
    assert details.status == JobStatus.SUCCEEDED
    assert [line for line in shown if line.startswith("line")] == ["line 0", "line 1", "line 2"]
    assert [line for line in shown if "reconnecting" in line and "timed out" in line]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_over", [True, False])
def test_a_dead_connection_to_a_living_head_is_opened_again(
    is_over: bool, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "SILENCE_S", 1000.0 if is_over else 0.5)
    shown: list[str] = []
    api = submit.connect(head.url)
    requests_of_logs = []
    tail = api.tail_job_logs

    def counted(job: str) -> object:
        requests_of_logs.append(job)
        if len(requests_of_logs) == 2 or is_over:
            head.end.touch()
        return tail(job)

    monkeypatch.setattr(api, "tail_job_logs", counted)
    assert follow.follow_to_the_end(api, "job", shown.append)
    assert shown == ["line 0", "line 1", "line 2"]
    assert len(requests_of_logs) == 2


@pytest.mark.timeout(60)
def test_no_request_waits_forever(head: Head) -> None:
    api = submit.connect(head.url)
    send_signal(head.process, signal.SIGSTOP)
    with pytest.raises(OSError, match="timed out"):
        api.get_job_info("job")
    with pytest.raises(ClusterError, match=r"does not show the log of the job job: .*timed out"):
        submit.log_of(api, "job")
    send_signal(head.process, signal.SIGCONT)
