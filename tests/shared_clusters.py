"""Ray clusters that tests share. A cluster that a test does not give back as it was is replaced, so that a failure stays alone."""

import json
import signal
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode

import psutil
import pytest
from forked_drivers import with_forked_drivers

from undula.cluster.forking.interpreter import write_interpreter
from undula.cluster.local import LocalCluster, local_cluster
from undula.errors import ClusterError
from undula.state.processes import descendants, send_signal
from undula.testing.nodes import Nodes, nodes

SETTLE_S = 10.0
"""Maximum seconds in which the jobs of a test end, and their actors."""
ANSWER_LIMIT_S = 10.0
RAYS_OWN = "_"
"""First character of the classes of actors that Ray keeps for all jobs, or of their namespaces."""
ALIVE = urlencode({"filter_keys": "state", "filter_predicates": "=", "filter_values": "ALIVE", "limit": 1000})


@pytest.fixture(scope="session")
def forking_python() -> Iterator[str]:
    """Interpreter with which nodes start workers quickly."""
    with TemporaryDirectory(prefix="undula-python-") as folder:
        yield write_interpreter(Path(folder))


@pytest.fixture(scope="session")
def cluster(forking_python: str) -> Iterator[LocalCluster]:
    """Cluster of one node."""
    with local_cluster(num_cpus=4, python=forking_python) as running:
        yield with_forked_drivers(running)


@pytest.fixture(scope="session")
def spot(forking_python: str) -> Iterator[Nodes]:
    """Cluster with nodes that can be added, drained and killed, and a head without workers."""
    with nodes(python=forking_python) as running:
        running.cluster = with_forked_drivers(running.cluster)
        yield running


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Replacement())


@dataclass(frozen=True)
class Shared:
    """Running cluster that tests share."""

    value: LocalCluster | Nodes
    is_for_session: bool
    end: Callable[[], None]


class Replacement:
    """Plugin of pytest that ends a shared cluster after a test that has failed, or that has left something in it.

    The next test starts a new one. Fixtures that depend on the cluster are made anew, too. A cluster of the session ends with the last
    test in a row that uses it, because an idle cluster takes a fifth of a core.
    """

    def __init__(self) -> None:
        self._shared: dict[str, Shared] = {}
        """Running clusters, by the name of their fixture."""
        self._has_failed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: Any) -> Generator[None, Any, Any]:
        value = yield
        if isinstance(value, LocalCluster | Nodes) and fixturedef.scope != "function":
            end = partial(fixturedef.finish, request)
            self._shared[fixturedef.argname] = Shared(value, fixturedef.scope == "session", end)
        return value

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if fixturedef.scope != "function":
            self._shared.pop(fixturedef.argname, None)

    def pytest_runtest_setup(self) -> None:
        self._has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed |= report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:
            for name in self._shared.keys() & set(getattr(item, "fixturenames", ())):
                shared = self._shared[name]
                left = "" if self._has_failed else left_in(shared.value)
                if left:
                    item.warn(pytest.PytestWarning(f"the cluster of the fixture {name} is replaced: {left}"))
                is_last = shared.is_for_session and name not in getattr(nextitem, "fixturenames", ())
                if left or self._has_failed or is_last:
                    processes = processes_of(shared.value)
                    shared.end()
                    for process in processes:
                        send_signal(process, signal.SIGKILL)


def processes_of(shared: LocalCluster | Nodes) -> list[psutil.Process]:
    """Return the processes of a cluster, and the drivers on it that tests have started."""
    cluster = shared.cluster if isinstance(shared, Nodes) else shared
    found = descendants(cluster.process)
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            if {cluster.address, cluster.dashboard} & set(child.environ().values()):
                found += [child, *descendants(child)]
    return found


def left_in(shared: LocalCluster | Nodes) -> str:
    """Return what a test has left in a cluster, after a moment in which it can end; nothing if the cluster is as before."""
    deadline_s = time.monotonic() + SETTLE_S
    while (left := _left_in(shared)) and time.monotonic() < deadline_s:
        time.sleep(0.1)  # limits the polling rate
    return left


def _left_in(shared: LocalCluster | Nodes) -> str:
    try:
        if isinstance(shared, Nodes) and (leaving := shared.leaving()):
            return f"nodes {', '.join(leaving)} were drained or lost, and not killed"
        cluster = shared.cluster if isinstance(shared, Nodes) else shared
        jobs = [job["job_id"] for job in _ask(cluster, "/api/jobs/") if job["status"] in ("PENDING", "RUNNING")]
        actors = _ask(cluster, f"/api/v0/actors?{ALIVE}")["data"]["result"]["result"]
        named = [(actor["class_name"], actor["ray_namespace"]) for actor in actors]
        own = [kind for kind, namespace in named if not (kind.startswith(RAYS_OWN) or namespace.startswith(RAYS_OWN))]
    except (ClusterError, OSError, ValueError) as error:
        return f"the head does not answer ({error})"
    left = [f"the {what} {', '.join(names)}" for what, names in (("jobs", jobs), ("actors", own)) if names]
    return f"{' and '.join(left)} are alive" if left else ""


def _ask(cluster: LocalCluster, path: str) -> Any:
    """Return the answer of a cluster's dashboard."""
    token = Path(cluster.env["RAY_AUTH_TOKEN_PATH"]).read_text().strip()
    request = urllib.request.Request(f"{cluster.dashboard}{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S) as answer:
        return json.load(answer)
