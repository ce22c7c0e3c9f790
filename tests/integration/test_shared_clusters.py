"""Tests that a failure in a shared cluster stays alone: the next tests get a cluster as it was before."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs_kit import ROOT

ON_RAY = """
import os
import subprocess
import time

DRIVER = '''
import ray
ray.init()

@ray.remote
class Left:
    def answers(self):
        return True

left = Left.remote()
print("the actor answers:", ray.get(left.answers.remote()), flush=True)
input()
'''
SEEN = []
BEGAN_S = time.monotonic()

def start_driver(cluster):
    env = {**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address}
    pipe = subprocess.PIPE
    driver = subprocess.Popen([cluster.python, "-c", DRIVER], env=env, text=True, stdin=pipe, stdout=pipe)
    assert driver.stdout.readline() == "the actor answers: True\\n"
    return driver

def test_fails(spot):
    node = spot.add()
    spot.await_all()
    SEEN.append(time.monotonic() - BEGAN_S)
    SEEN.extend([spot, start_driver(spot.cluster), time.monotonic()])
    spot.drain(node, deadline_s=600)
    raise AssertionError("made to fail")

def test_gets_a_new_cluster_within_a_minute(spot):
    start_s, before, driver, failed_s = SEEN
    assert spot is not before
    spot.add()
    spot.await_all()
    assert time.monotonic() - failed_s < max(60, 3 * start_s)  # a busy machine starts a cluster slowly
    assert driver.wait(10) != 0
    SEEN[:] = [spot]

def test_gets_the_same_cluster_and_leaves_a_driver(spot):
    assert SEEN == [spot]
    SEEN.append(start_driver(spot.cluster))

def test_gets_another_one(spot):
    before, driver = SEEN
    assert spot is not before
    assert driver.wait(10) != 0
"""
WITHOUT_RAY = """
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from undula.cluster.local import LocalCluster

JOBS, STARTED = [], []
OF_RAY = '{"class_name": "_Coordinator", "ray_namespace": "Coordinator"}'

class Dashboard(BaseHTTPRequestHandler):
    def do_GET(self):
        jobs = str([{"job_id": each, "status": "RUNNING"} for each in JOBS]).replace("'", '"')
        self.send_response(200)
        self.end_headers()
        actors = '{"data": {"result": {"result": [' + OF_RAY + ']}}}'
        self.wfile.write((jobs if "jobs" in self.path else actors).encode())

@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    (token := tmp_path_factory.mktemp("cluster") / "token").touch()
    server = HTTPServer(("127.0.0.1", 0), Dashboard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    STARTED.append(url := f"http://127.0.0.1:{server.server_port}")
    yield LocalCluster("", url, {"RAY_AUTH_TOKEN_PATH": str(token)}, psutil.Process(), "", Path())
    server.shutdown()
    server.server_close()
    JOBS.clear()

@pytest.fixture(scope="module")
def made_from_it(cluster):
    return len(STARTED)

def test_fails(made_from_it):
    assert made_from_it == 1
    raise AssertionError("made to fail")

def test_gets_the_second(made_from_it):
    assert made_from_it == 2

def test_gets_the_second_again_and_leaves_a_job(made_from_it):
    assert made_from_it == 2
    JOBS.append("01000000")

def test_gets_the_third(made_from_it):
    assert made_from_it == 3

def test_needs_none_so_that_it_ends():
    pass

def test_gets_the_fourth(made_from_it):
    assert made_from_it == 4
"""


def run(tests: str, folder: Path) -> str:
    """Run tests with the fixtures of shared clusters, of which one fails and another leaves something, and return the output."""
    (folder / "test_inner.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "shared_clusters", "-c", "/dev/null", "--rootdir", str(folder)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*command, str(folder)], cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert re.search(r"= 1 failed, [35] passed, 1 warning in ", done.stdout), done.stdout + done.stderr
    assert "made to fail" in done.stdout
    return done.stdout


def test_a_cluster_is_used_again_only_if_it_was_given_back_as_it_was(tmp_path: Path) -> None:
    out = run(WITHOUT_RAY, tmp_path)
    assert "the cluster of the fixture cluster is replaced: the jobs 01000000 are alive" in out


@pytest.mark.nightly
def test_a_test_that_fails_in_a_shared_cluster_fails_alone_and_costs_less_than_a_minute(tmp_path: Path) -> None:
    out = run(ON_RAY, tmp_path)
    assert "the cluster of the fixture spot is replaced: the jobs 01000000 and the actors Left are alive" in out
