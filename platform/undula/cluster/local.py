"""Ray cluster on this machine that exists during a `with` block. It has its own token, and its files are deleted at the end."""

import ctypes
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from undula.errors import ClusterError
from undula.state.processes import descendants, end_group, is_alive

DEFAULT_DASHBOARD = "http://127.0.0.1:8265"
START_TIMEOUT_S = 900
"""Maximum seconds for which a cluster whose processes are alive may start. A busy machine needs minutes."""
SLOW_START_S = 30.0
"""Seconds after which a warning says that the cluster still starts."""
STOP_TIMEOUT_S = 3.0  # a raylet with detached actors would wait far longer, for no benefit
PORTS = range(20_000, 32_768)
"""Ports for processes of a cluster. Ray gives its workers lower ones, and Linux gives higher ones to outgoing connections."""
MOST_BASE = 20
"""Maximum length of the path of the folder for temporary files. With 24, the paths of Ray's sockets exceed the limit of 107 bytes."""
PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
STARTS = "UNDULA_CLUSTER_STARTS"
"""Environment variable of a process that was started with its cluster: the path of the raylet's socket, for which it is to wait."""
JOB_AGENT = "dashboard-agent-listen"
AGENTS = (JOB_AGENT, "dashboard-agent-grpc", "metrics-export", "runtime-env-agent")
"""Agents of a node that do not choose their ports, as options of `ray start` name them. The raylet of Ray 2.60 waits for the files in which
agents write the ports that they have chosen, and ends if they have not started after 15 s, as on a busy machine."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class LocalCluster:
    """A running local cluster."""

    address: str
    """Address for `ray.init(address=...)`."""
    dashboard: str
    """URL for `ray job submit --address ...`."""
    env: Mapping[str, str]
    """Environment variables that a client needs, with the path of the token."""
    process: psutil.Process
    """`ray start --block`, which leads the process group of all of the cluster's processes."""
    python: str
    """Path of the interpreter of the cluster and its jobs."""
    folder: Path
    """Folder of the cluster's sockets, logs and token."""
    agent_port: int = 0
    """Port of the agent that runs jobs."""

    @property
    def raylet_socket(self) -> Path:
        """Path of the raylet's socket, which exists once the node can run tasks."""
        return self.folder / "session_latest" / "sockets" / "raylet"


@contextmanager
def local_cluster(
    num_cpus: int,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
    object_store_bytes: int | None = None,
    autoscaling: Path | None = None,
) -> Iterator[LocalCluster]:
    """Start a cluster of one node that accepts jobs, and stop it at the end of the block.

    Args:
        num_cpus: Number of logical CPUs.
        env: Additional environment variables of the cluster and its jobs.
        python: Interpreter of the cluster and its jobs.
        object_store_bytes: Size of the object store in bytes; by default Ray's choice.
        autoscaling: Path of a configuration for Ray's autoscaler; by default, no autoscaler runs.

    Raises:
        ClusterError: The cluster did not start.
    """
    with starting_cluster(num_cpus, env, python, object_store_bytes, autoscaling) as cluster:
        await_start(cluster, lambda: listens(cluster.agent_port) and job_api_answers(cluster.dashboard))
        yield cluster


@contextmanager
def starting_cluster(
    num_cpus: int,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
    object_store_bytes: int | None = None,
    autoscaling: Path | None = None,
    accepts_jobs: bool = True,
) -> Iterator[LocalCluster]:
    """Begin to start a cluster, as `local_cluster` does, and do not wait until it answers.

    A cluster that does not accept jobs, because it has no dashboard, starts twice as fast. Scripts can connect to it.
    """
    folder = short_folder("undula-ray-")
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    gcs, dashboard, *agents = free_ports(2 + len(AGENTS))
    ports = dict(zip(AGENTS, agents, strict=True))
    options = [] if object_store_bytes is None else [f"--object-store-memory={object_store_bytes}"]
    options.append(f"--autoscaling-config={autoscaling}" if autoscaling else "--no-monitor")
    options.append(f"--dashboard-port={dashboard}" if accepts_jobs else "--include-dashboard=false")
    options += [f"--{agent}-port={port}" for agent, port in ports.items()]
    command = _ray_start(python, num_cpus, folder, gcs, options)
    bin_folder = str(Path(python).parent)
    settings = {
        "RAY_worker_niceness": "0",  # by default, Ray gives workers the lowest priority on the machine
        # Read tasks repeatedly allocate tens of MiB. By default, Arrow's allocator returns freed memory, which causes page faults.
        "MIMALLOC_PURGE_DELAY": "10000",
        "RAY_prestart_worker_first_driver": "0",  # prestarted processes do not have a job's runtime environment
        **dict.fromkeys(("RAY_raylet_start_wait_time_s", "RAY_DASHBOARD_STARTUP_TIMEOUT_S"), f"{START_TIMEOUT_S}"),
        "RAY_agent_register_timeout_ms": f"{START_TIMEOUT_S}000",
    }
    ask_this_machine_directly()
    # The order of a set of texts is then the same in the driver and in workers, which may make a dataset in such an order.
    environment = {"PYTHONHASHSEED": "0", **os.environ, **auth, **settings, **(env or {})}
    if folder.parent != Path(tempfile.gettempdir()):
        environment["TMPDIR"] = str(folder)  # Ray's processes put sockets there, too
    environment["PATH"] = f"{bin_folder}{os.pathsep}{environment.get('PATH', '')}"  # jobs run `python`
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        environment.pop(name, None)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        log = stack.enter_context((folder / "start.log").open("w+"))
        process = subprocess.Popen(
            command,
            cwd=folder,  # Python would import modules of the working directory in place of its own, such as string.py
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=before_exec,
        )
        # SIGTERM makes `ray start --block` end its children. A cluster for one script has nothing left to save when that has ended.
        stack.callback(end_group, process, STOP_TIMEOUT_S if accepts_jobs else 0.0)
        url = f"http://127.0.0.1:{dashboard}"
        cluster = LocalCluster(
            f"127.0.0.1:{gcs}", url, auth, psutil.Process(process.pid), python, folder, ports[JOB_AGENT]
        )
        yield cluster


def short_folder(prefix: str) -> Path:
    """Make a new folder for temporary files whose path is short enough for Ray, which puts sockets below it, and return its path.

    Raises:
        ClusterError: There is no place for it.
    """
    base = tempfile.gettempdir()
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=base if len(os.fsencode(base)) <= MOST_BASE else "/tmp"))
    except OSError as error:
        raise ClusterError(
            f"a local Ray cluster needs a folder with a path of at most {MOST_BASE} characters, because Ray puts sockets below it, but "
            f"/tmp cannot be used: {error.strerror}; set TMPDIR to such a folder"
        ) from error


def _ray_start(python: str, num_cpus: int, folder: Path, gcs_port: int, options: Sequence[str]) -> list[str]:
    (client,) = free_ports(1)
    return [
        *(python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--include-log-monitor=False", f"--num-cpus={num_cpus}", f"--temp-dir={folder}"),
        *("--node-ip-address=127.0.0.1", f"--port={gcs_port}"),
        *(f"--ray-client-server-port={client}", *options),
    ]


def cluster_at_hand() -> str | None:
    """Return the job API's URL of the cluster that RAY_API_SERVER_ADDRESS names or that runs on this machine; None if there is none."""
    ask_this_machine_directly()
    named = os.environ.get("RAY_API_SERVER_ADDRESS")
    return named or (DEFAULT_DASHBOARD if job_api_answers(DEFAULT_DASHBOARD) else None)


def ask_this_machine_directly() -> None:
    """Let this process and those that it starts ask no proxy for servers of this machine."""
    if any(os.environ.get(proxy) for proxy in PROXIES):
        given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        hosts = dict.fromkeys([*(host for host in given.split(",") if host), "127.0.0.1", "localhost"])
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*" if given == "*" else ",".join(hosts)


def job_api_answers(dashboard: str) -> bool:
    """Return whether a Ray dashboard answers at this URL, even if it rejects the request."""
    try:
        with urllib.request.urlopen(f"{dashboard}/api/version", timeout=2) as response:
            return b"ray_version" in response.read()
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)
    except (OSError, ValueError):
        return False


def await_start(cluster: LocalCluster, has_started: Callable[[], bool]) -> None:
    """Wait until a cluster has started.

    Raises:
        ClusterError: A process of the cluster has ended, or it has not started within START_TIMEOUT_S.
    """
    began = looked = time.monotonic()
    is_slow = False
    while not has_started():
        _name_port(cluster)
        if (now := time.monotonic()) > looked + 1.0 or not is_alive(cluster.process):
            looked, problem = now, _problem_of_start(cluster, now - began)
            if problem:
                log = (cluster.folder / "start.log").read_text()
                raise ClusterError(f"the local Ray cluster {problem}: {' '.join(log.split())[-1000:]}")
        if now > began + SLOW_START_S and not is_slow:
            is_slow = True
            logging.getLogger("undula").warning("the local Ray cluster still starts; is this machine busy?")
        time.sleep(0.1)


def _problem_of_start(cluster: LocalCluster, seconds: float) -> str | None:
    """Return why a cluster that has not started for some seconds will not start; None if it may."""
    if not is_alive(cluster.process):
        return "ended while it started"
    if any(not is_alive(process) for process in descendants(cluster.process) if _name(process) == "raylet"):
        return "lost its raylet while it started"  # `ray start` would wait for it
    return f"did not start within {START_TIMEOUT_S} s" if seconds > START_TIMEOUT_S else None


def _name_port(cluster: LocalCluster) -> None:
    """Tell the raylet which port the agent that runs jobs will have.

    The raylet waits for the file in which this agent writes its port, also if that is given, and ends after 15 s without it.
    """
    written = cluster.folder / "agent-port"
    if not written.exists():
        written.write_text(str(cluster.agent_port))
    for gcs in (cluster.folder / "session_latest").glob("gcs_server_port_*"):  # these names have the node's id
        with suppress(FileExistsError):
            os.link(written, gcs.with_name(gcs.name.replace("gcs_server", "dashboard_agent_listen")))


def listens(port: int) -> bool:
    """Return whether a process of this machine listens on a port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


def _name(process: psutil.Process) -> str:
    """Return the name of a process; empty if it has ended and its parent has waited for it."""
    with suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""


def before_exec() -> None:
    """Make the new process end with its parent and run as a batch process.

    Ray's daemons wake up a thousand times per second and must not preempt training.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def free_ports(count: int) -> list[int]:
    """Return ports on which no process listens now, and that the system does not take for outgoing connections."""
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            listener = stack.enter_context(socket.socket())
            with suppress(OSError):
                listener.bind(("", secrets.choice(PORTS)))
                ports.append(listener.getsockname()[1])
    return ports
