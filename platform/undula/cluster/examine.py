"""Examination of a running cluster by a probe on each node. The nodes are queried in parallel and with a time limit, so a node that hangs
delays the examination by a few seconds only."""

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

import undula
from undula.cluster.facts import AllReduce, Clock, Facts, FailedConnection, NodeFacts, Stored
from undula.cluster.probe import Probe
from undula.elastic.ray.capacity import free_resources, workers_on_nodes
from undula.elastic.ray.ray_logging import stop_error_messages
from undula.errors import ClusterError, one_line
from undula.plan.fleet import MARKET, SPOT
from undula.report.text import counted

LIMIT_S = 50.0
"""Time limit in seconds for all requests together, because users would skip an examination that takes longer."""
CONNECT_TIMEOUT_S = 10.0
"""Time limit in seconds for a TCP connection to the head."""
CONNECT_LIMIT_S = 30.0
"""Time limit in seconds for Ray to connect and list the nodes. Ray waits for minutes if the head accepts connections but does not answer,
and reports a wrong token after 20 s."""
LEAST_S = 5.0
"""Minimum time in seconds that must be left to start a request."""
REPORT_LIMIT_S = 25.0
"""Time limit in seconds for a node's report. A new process on a small node takes 10 s to import torch."""
GPU_LIMIT_S = 15.0
CLOCK_TRIES = 8
QUESTION_LIMIT_S = 5.0
REACH_LIMIT_S = 10.0
LEAVE_LIMIT_S = 10.0
STORE_LIMIT_S = 15.0
REDUCE_LIMIT_S = 20.0
MEET_LIMIT_S = 12.0
"""Time limit in seconds for the ranks of the all-reduce to connect; shorter than REDUCE_LIMIT_S, so that the ranks report the problem."""
PROBE: Mapping[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 8}
"""Options of a probe. It takes no CPUs, so a busy cluster can be examined as well."""
_IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets in submitted jobs. Such a job already ships its packages."""
FREE, WORKERS = "Free", "Workers"
T = TypeVar("T")


def examine(address: str, runs: str, log: Callable[[str], None]) -> Facts:
    """Connect to a cluster and collect its facts. The examination removes everything that it creates.

    Args:
        address: Address of the head, HOST:PORT; `auto` for the cluster of this machine.
        runs: Absolute path or URL of the run directories.
        log: Function that shows which measurement is running.

    Raises:
        ClusterError: The cluster cannot be reached.
    """
    log("connecting ...")
    late = f"cannot connect to the Ray cluster {address}: no answer within {CONNECT_LIMIT_S:g} s; check that it is up"
    dashboard, alive = _within(CONNECT_LIMIT_S, partial(connect, address), late)
    try:
        examination = _Examination(alive, runs, log)
        try:
            return examination.facts(dashboard)
        finally:
            examination.close()
    finally:
        ray.shutdown()


def _within(limit_s: float, do: Callable[[], T], late: str) -> T:
    """Call a function in a thread and return its result. A call that exceeds the limit is abandoned; its thread ends with the process.

    Raises:
        ClusterError: The call took too long; the message is `late`.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(do())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="undula-examine", daemon=True).start()
    if not wait([done], limit_s).done:
        raise ClusterError(late)
    return done.result()


def connect(address: str) -> tuple[str, list[dict[str, Any]]]:
    """Connect and return the dashboard's HOST:PORT, which is empty if there is none, and records of the nodes that are alive.

    The records are Ray's, and also have the free resources (FREE) and the number of workers (WORKERS) of each node.
    """
    if re.fullmatch(r"[^/]+:\d+", address):  # if nothing listens there, Ray takes a minute to report it
        try:
            socket.create_connection(address.rsplit(":", 1), timeout=CONNECT_TIMEOUT_S).close()  # type: ignore[arg-type]
        except OSError as error:
            raise ClusterError(
                f"cannot connect to the Ray cluster {address}: {error}; check the address and that the cluster is up"
            ) from None
    package = str(Path(undula.__file__).parent)
    environment = None if _IN_JOB in os.environ else {"py_modules": [package]}
    try:
        context = ray.init(address, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        why = one_line(error)[:300]
        if "AuthenticationError" in f"{type(error).__name__} {error.__cause__}":
            why = "it rejects the token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file of the cluster's token"
        if isinstance(error, ConnectionError) and address == "auto":
            raise ClusterError(
                "no Ray cluster runs on this machine: give its head's HOST:PORT with --cluster, or set RAY_ADDRESS"
            ) from error
        raise ClusterError(f"cannot connect to the Ray cluster {address}: {why}") from error
    stop_error_messages()
    nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]
    free, workers = free_resources(), workers_on_nodes()
    more = {node["NodeID"]: {FREE: free.get(node["NodeID"], {}), WORKERS: workers[node["NodeID"]]} for node in nodes}
    return str(context.dashboard_url or ""), [{**node, **more[node["NodeID"]]} for node in nodes if node["Alive"]]


class Budget:
    """Time budget for the requests of an examination.

    Attributes:
        unmeasured: Checks that are incomplete because no time was left.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic):
        self.unmeasured: set[str] = set()
        self._clock = clock
        self._deadline = clock() + limit_s

    def grant(self, check: str | None, limit_s: float) -> float | None:
        """Return the time in seconds for a request, or None if it is too short to expect an answer.

        Args:
            check: Name of the check that needs the request; None for a request that is sent in any case.
            limit_s: Time in seconds after which a missing answer is a problem of the node.
        """
        left_s = self._deadline - self._clock()
        if check is None:
            return max(1.0, min(limit_s, left_s))
        if left_s < min(limit_s, LEAST_S):
            self.unmeasured.add(check)
            return None
        return min(limit_s, left_s)

    def is_cut(self, check: str | None, granted_s: float, limit_s: float) -> bool:
        """Return whether the granted time was shorter than the limit, so that a missing answer does not indicate a problem of the node."""
        if check is None or granted_s >= limit_s:
            return False
        self.unmeasured.add(check)
        return True


class _Examination:
    """Requests of an examination, in their order. A node that hangs or dies is left out of later requests."""

    def __init__(self, alive: list[dict[str, Any]], runs: str, log: Callable[[str], None]):
        self._runs, self._log = runs, log
        self._budget = Budget(LIMIT_S)
        self._unresponsive: dict[str, str] = {}
        self._nodes = {node["NodeID"]: _node(node) for node in alive}
        self._sessions = {node["NodeID"]: str(Path(node["ObjectStoreSocketName"]).parents[1]) for node in alive}
        actor: Any = ray.remote(Probe)
        self._probes = {
            id: actor.options(**PROBE, label_selector={"ray.io/node-id": id}).remote() for id in self._nodes
        }

    def facts(self, dashboard: str) -> Facts:
        self._log(f"examining {counted(len(self._nodes), 'node')} ...")
        arguments = {id: (session, self._runs) for id, session in self._sessions.items()}
        reports, problems = self._ask("report", arguments, REPORT_LIMIT_S)
        self._unresponsive.update(problems)
        with_gpus = {id: () for id, report in reports.items() if report.gpus_seen}
        gpus, gpu_problems = self._ask("gpus", with_gpus, GPU_LIMIT_S, "gpus")
        self._unresponsive.update(
            {id: f"a matrix product on its GPUs: {problem}" for id, problem in gpu_problems.items()}
        )
        clocks = self._clocks()
        head = [id for id, node in self._nodes.items() if node.is_head]
        where = {id: (dashboard,) for id in head if dashboard}
        statuses, _ = self._ask("ask_dashboard", where, QUESTION_LIMIT_S, "token")
        failed_connections = self._failed_connections()
        stored = self._storage()
        healthy = [id for id, on_node in gpus.items() if not any(gpu.problem for gpu in on_node)]
        all_reduce = self._all_reduce([id for id in healthy if self._nodes[id].gpus])
        return Facts(
            self._runs,
            tuple(self._nodes.values()),
            dict(self._unresponsive),
            reports,
            gpus,
            clocks,
            failed_connections,
            stored,
            all_reduce,
            next(iter(statuses.values()), None),
            tuple(sorted(self._budget.unmeasured)),
        )

    def close(self) -> None:
        for probe in self._probes.values():
            ray.kill(probe)

    def _ask(
        self, method: str, arguments: Mapping[str, tuple[Any, ...]], limit_s: float, check: str | None = None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Call a method of several probes in parallel.

        Args:
            method: Name of the method.
            arguments: Arguments by node id.
            limit_s: Time limit in seconds.
            check: Name of the check that needs the answers; None if the request is sent in any case.

        Returns:
            The answers and the problems by node id; both are empty if no time is left for the check.
        """
        to_ask = {id: given for id, given in arguments.items() if id not in self._unresponsive}
        granted_s = self._budget.grant(check, limit_s) if to_ask else None
        if granted_s is None:
            return {}, {}
        refs = {id: getattr(self._probes[id], method).remote(*given) for id, given in to_ask.items()}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=granted_s)
        answers, problems = {}, {}
        for id, ref in refs.items():
            try:
                answers[id] = ray.get(ref, timeout=0)
            except GetTimeoutError:
                if not self._budget.is_cut(check, granted_s, limit_s):
                    problems[id] = f"no answer within {granted_s:.0f} s"
            except RayActorError:
                problems[id] = self._unresponsive[id] = "the node or its probe died during the examination"
            except RayTaskError as error:
                problems[id] = f"{type(error.cause).__name__}: {error.cause}".splitlines()[0]
            except RayError as error:
                problems[id] = one_line(error)[:300]
        return answers, problems

    def _clocks(self) -> dict[str, Clock]:
        self._log("comparing clocks ...")
        clocks: dict[str, Clock] = {}
        for id in self._nodes:
            for _ in range(CLOCK_TRIES):
                asked = time.time()
                answers, problems = self._ask("clock", {id: ()}, QUESTION_LIMIT_S, "clocks")
                answered = time.time()
                self._unresponsive.update(problems)
                if id not in answers:
                    break
                clock = Clock(answers[id] - (asked + answered) / 2, answered - asked)
                clocks[id] = min(clocks.get(id, clock), clock, key=lambda measured: measured.round_trip_s)
        return clocks

    def _failed_connections(self) -> tuple[FailedConnection, ...]:
        self._log("connecting nodes to each other ...")
        ports, _ = self._ask("listen", dict.fromkeys(self._nodes, ()), QUESTION_LIMIT_S, "ports")
        where = {id: (self._nodes[id].address, port) for id, port in ports.items()}
        others = {id: ({peer: at for peer, at in where.items() if peer != id},) for id in where}
        answers, problems = self._ask("reach", others, REACH_LIMIT_S, "ports")
        self._unresponsive.update(problems)
        return tuple(
            FailedConnection(id, peer, problem)
            for id, failed in answers.items()
            for peer, problem in failed.items()
            if peer not in self._unresponsive  # that node is already reported
        )

    def _storage(self) -> dict[str, Stored]:
        """Test the storage from all nodes, and whether they see a file that one node has written. This node is the head if it answers."""
        self._log(f"writing to {self._runs} ...")
        folder = f"{self._runs}/.undula-doctor-{secrets.token_hex(4)}"
        ours = secrets.token_bytes(32)
        answering = [id for id in self._nodes if id not in self._unresponsive]
        for first in sorted(answering, key=lambda id: not self._nodes[id].is_head)[:1]:
            written, problems = self._ask("leave", {first: (folder, ours)}, LEAVE_LIMIT_S, "storage")
            if problem := written.get(first) or problems.get(first):
                return {first: Stored(problem=problem)}
            if first not in written:
                break
            arguments = {id: (folder, id, ours) for id in answering}
            answers, problems = self._ask("store", arguments, STORE_LIMIT_S, "storage")
            apart = [id for id, test in answers.items() if test.problem is None and not test.sees_ours]
            self._ask("clean", dict.fromkeys((first, *apart), (folder,)), QUESTION_LIMIT_S)
            late = {id: Stored(problem=problem) for id, problem in problems.items() if id not in self._unresponsive}
            return {**answers, **late}
        return {}

    def _all_reduce(self, with_gpus: list[str]) -> AllReduce | None:
        """Measure an all-reduce between the nodes with GPUs, or between all worker nodes if no node has GPUs.

        Returns:
            The measurement; None if no time was left.
        """
        training = [id for id, node in self._nodes.items() if node.trains and id not in self._unresponsive]
        with_gpus = [id for id in with_gpus if id in training]
        ids = with_gpus or training
        group = AllReduce(tuple(ids), "nccl" if with_gpus else "gloo")
        if len(ids) < 2:
            return group
        self._log(f"measuring an all-reduce between {len(ids)} nodes ...")
        ports, problems = self._ask("free_port", {ids[0]: ()}, QUESTION_LIMIT_S, "all-reduce")
        if not ports:
            return AllReduce(group.nodes, group.backend, problems=problems) if problems else None
        meet = (group.backend, self._nodes[ids[0]].address, ports[ids[0]])
        arguments = {id: (*meet, rank, len(ids), MEET_LIMIT_S) for rank, id in enumerate(ids)}
        answers, problems = self._ask("all_reduce", arguments, REDUCE_LIMIT_S, "all-reduce")
        if "all-reduce" in self._budget.unmeasured:
            return None
        latencies_s, rates = zip(*answers.values(), strict=True) if answers else ((0.0,), (0.0,))
        return AllReduce(group.nodes, group.backend, max(latencies_s), min(rates), problems)


def _node(node: Mapping[str, Any]) -> NodeFacts:
    resources = node["Resources"]
    return NodeFacts(
        node["NodeID"],
        node["NodeManagerAddress"],
        resources.get("CPU", 0.0),
        resources.get("GPU", 0.0),
        "node:__internal_head__" in resources,
        node["Labels"].get(MARKET) == SPOT,
        node[FREE].get("GPU", 0.0),
        node[WORKERS],
    )
