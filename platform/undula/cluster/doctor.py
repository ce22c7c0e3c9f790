"""Checks of `undula doctor`. They evaluate the facts of an examination and report each problem with a fix."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Literal

from undula.cluster.facts import Facts, FileSystem
from undula.elastic.pure.nodes import fix_of_unseen_gpus

Verdict = Literal["pass", "warn", "fail"]
Problems = Iterator[tuple[Verdict, str]]

SKEW_WARN_S = 0.5
"""Clock skew in seconds that causes a warning."""
SKEW_FAIL_S = 5.0
"""Clock skew in seconds that fails the check. The deadline of a notice is a wall-clock time, and the shortest notice is 30 s. If the
skew reduces it by this much, the time that remains may be too short for a step and a checkpoint."""
DISK_WARN_BYTES = 10 * 2**30
"""Free disk space in bytes that causes a warning. A checkpoint of 350 M parameters with AdamW takes 4 GiB, and the previous checkpoint is
deleted only when the next one is complete."""
DISK_FAIL_BYTES = 2**30
"""Free disk space in bytes that fails the check."""
DISK_FAIL_SHARE = 0.05
"""Fraction of free disk space that fails the check: below it, Ray does not spill objects (local_fs_capacity_threshold)."""
MEMORY_WARN_BYTES = 2 * 2**30
"""Free shared memory in bytes that causes a warning. Snapshots use at most half of it for two slots. Each slot then has 512 MiB, the
state of 45 M parameters with AdamW."""
MEMORY_FAIL_BYTES = 128 * 2**20
"""Free shared memory in bytes that fails the check. Docker's default of 64 MiB is too small for NCCL's buffers and Ray's objects."""
STORE_WARN_BYTES_PER_S = 10 * 2**20
"""Storage rate in bytes per second that causes a warning. At this rate, a checkpoint of 1 GiB takes most of AWS's notice of 2 minutes."""
GRADIENT_BYTES = 4 * 100_000_000
"""Size in bytes of the float32 gradients of 100 M parameters."""
OPEN_PORTS = "allow the cluster's nodes to reach each other on all TCP ports (a rule of their security group with the group as its source)"
MAY_BE_MISSING = {
    "undula": "install it if you start the spot watcher there or run scripts without `undula run`, which ships it with the job",
    "horovod": "run `undula build-horovod` on these nodes, or do not use engine: horovod",
}
"""Packages that only some jobs need, each with the advice for a node that lacks it."""
UNMEASURED = "not measured, or not on all nodes, because no time was left; fix the problems that took the time and run the doctor again"
NAMED = 4
"""Maximum number of nodes or pairs that a check lists one by one."""


@dataclass(frozen=True)
class Result:
    """Result of a check, which is one line of the doctor's output."""

    check: str
    verdict: Verdict
    message: str


@dataclass(frozen=True)
class Check:
    """Check of the doctor."""

    problems: Callable[[Facts], Problems]
    """Function that yields the problems, each with its fix."""
    summary: Callable[[Facts], str]
    """Function that summarizes the facts if there is no problem; the summary is empty if nothing is known."""


def judge(facts: Facts) -> list[Result]:
    """Run all checks and return their results, in the order in which a user should fix the problems."""
    results = []
    for name, check in CHECKS.items():
        problems = [Result(name, verdict, message) for verdict, message in check.problems(facts)]
        if name in facts.unmeasured:
            problems.append(Result(name, "warn", UNMEASURED))
        summary = "" if problems else check.summary(facts)
        results += [*problems, *([Result(name, "pass", summary)] if summary else [])]
    return results


def _unresponsive_nodes(facts: Facts) -> Problems:
    fix = (
        "check that it is up (`ray list nodes`) and read its raylet's log (in /tmp/ray/session_latest/logs on the node), or "
        "terminate the machine so that Ray replaces it"
    )
    for id, reason in facts.unresponsive.items():
        yield "fail", f"{facts.node(id).name} could not be examined completely ({reason}); {fix}"
    if not any(node.trains for node in facts.nodes):
        fix = "start one first (min_workers of cluster.yaml, or ray.autoscaler.sdk.request_resources)"
        yield "warn", f"no worker node is up, so nothing is known about worker nodes; {fix}"


def _all_nodes(facts: Facts) -> str:
    return f"{_count(facts.nodes, 'node answers', 'nodes answer')}, and workers fit on {sum(node.trains for node in facts.nodes)}"


def _missing_token(facts: Facts) -> Problems:
    if facts.dashboard_status is None:
        problem = "the dashboard does not answer on the head, so it is not known whether Ray requires a token"
        if "token" not in facts.unmeasured:
            yield "warn", f"{problem}; start Ray without --include-dashboard=false"
    elif facts.dashboard_status not in (401, 403):
        fix = "start it on all nodes with RAY_AUTH_MODE=token and a token from `ray get-auth-token --generate`"
        yield (
            "fail",
            f"Ray accepts unauthenticated requests (status {facts.dashboard_status}), so anybody can run code; {fix}",
        )


def _token(facts: Facts) -> str:
    return f"Ray rejects unauthenticated requests (status {facts.dashboard_status})"


def _packages(facts: Facts) -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """Yield each package with its version by node, and the nodes without it."""
    for package in dict.fromkeys(name for report in facts.reports.values() for name in report.versions):
        versions = {id: report.versions.get(package) for id, report in facts.reports.items()}
        installed = {id: version for id, version in versions.items() if version is not None}
        if installed or package not in MAY_BE_MISSING:
            yield package, installed, [id for id in versions if id not in installed]


def _different_versions(facts: Facts) -> Problems:
    for package, versions, missing in _packages(facts):
        if _differ(facts, versions) or (missing and package not in MAY_BE_MISSING):
            groups = [*_by_value(versions), *([("none", missing)] if missing else [])]
            where = "; ".join(f"{version} on {_names(facts, ids)}" for version, ids in groups)
            yield "fail", f"{package} is {where}; install one version on all nodes (setup_commands of cluster.yaml)"
        elif missing:
            yield "warn", f"{package} is not installed on {_names(facts, missing)}; {MAY_BE_MISSING[package]}"


def _differ(facts: Facts, versions: Mapping[str, str]) -> bool:
    """Return whether versions differ. Builds of the same version may differ between the head and the worker nodes, because a head without
    GPUs can have torch for CPUs."""
    builds = {version for id, version in versions.items() if facts.node(id).trains}
    return len(builds) > 1 or len({version.partition("+")[0] for version in versions.values()}) > 1


def _versions(facts: Facts) -> str:
    """Return the packages with their versions, if possible those of a worker node."""
    first = {
        package: max(installed, key=lambda id: facts.node(id).trains) for package, installed, _ in _packages(facts)
    }
    return ", ".join(f"{package} {facts.reports[id].versions[package]}" for package, id in first.items())


def _skewed_clocks(facts: Facts) -> Problems:
    for id, clock in facts.clocks.items():
        certain_s = abs(clock.offset_s) - clock.round_trip_s / 2
        if certain_s > SKEW_WARN_S:
            skew = f"{abs(clock.offset_s):.1f} s {'ahead of' if clock.offset_s > 0 else 'behind'} this machine's"
            fix = "the deadlines of notices are wall-clock times; start chrony on the node, or run `timedatectl set-ntp true`"
            verdict: Verdict = "fail" if certain_s > SKEW_FAIL_S else "warn"
            yield verdict, f"the clock of {facts.node(id).name} is {skew}, but {fix}"


def _clocks(facts: Facts) -> str:
    most_s = max((abs(clock.offset_s) + clock.round_trip_s / 2 for clock in facts.clocks.values()), default=None)
    return f"within {most_s * 1e3:.1f} ms of this machine's" if most_s is not None else ""


def _closed_ports(facts: Facts) -> Problems:
    for count, failed in enumerate(facts.failed_connections[:NAMED], start=1):
        more = len(facts.failed_connections) - NAMED if count == NAMED else 0
        rest = f", and {more} more pairs of nodes have the same problem" if more > 0 else ""
        pair = (
            f"{facts.node(failed.source).name} cannot reach {facts.node(failed.target).name} ({failed.problem}){rest}"
        )
        yield "fail", f"{pair}; {OPEN_PORTS}"


def _ports(facts: Facts) -> str:
    if len(facts.reports) < 2:
        return "the cluster has one node, so no connection was tested" if facts.reports else ""
    return "every node reaches every other node on a port chosen by the operating system"


def _broken_gpus(facts: Facts) -> Problems:
    for id, report in facts.reports.items():
        node = facts.node(id)
        seen = f"Ray has GPU: {node.gpus:g} for {node.name}, but torch sees {report.gpus_seen}"
        if report.gpus_seen < node.gpus:
            yield "fail", f"{seen}; {fix_of_unseen_gpus(report.cuda)}"
        elif report.gpus_seen > node.gpus:
            yield "warn", f"{seen}; set GPU in the resources of its node type, or `ray start --num-gpus`"
        for gpu in facts.gpus.get(id, ()):
            if gpu.problem and gpu.is_full:
                fix = "stop the process that uses it, unless it is a job of yours"
                yield "warn", f"{gpu.name} of {node.name} was not tested because {gpu.problem}; {fix}"
            elif gpu.problem:
                yield "fail", f"{gpu.name} of {node.name}: {gpu.problem}; terminate the machine so that Ray replaces it"


def _idle_gpus(facts: Facts) -> Problems:
    for node in facts.nodes:
        if node.num_workers and (idle := int(node.free_gpus)):
            fix = "set workers.gpus to auto, and lower workers.cpus or raise workers.max if there is a worker for only some GPUs"
            workers = _count(range(node.num_workers), "worker trains", "workers train")
            yield "warn", f"{idle} of {node.gpus:g} GPUs of {node.name} are idle, although {workers} there; {fix}"


def _gpu_problems(facts: Facts) -> Problems:
    yield from _broken_gpus(facts)
    yield from _idle_gpus(facts)


def _gpus(facts: Facts) -> str:
    gpus = [gpu for on_node in facts.gpus.values() for gpu in on_node]
    if gpus:
        return f"{_count(gpus, 'GPU multiplies', 'GPUs multiply')} matrices correctly"
    return "the cluster has no GPUs" if facts.reports else ""


def _failed_all_reduce(facts: Facts) -> Problems:
    result = facts.all_reduce
    if result and result.problems:
        id, problem = next(iter(result.problems.items()))
        group = f"an all-reduce of {len(result.nodes)} nodes with {result.backend} failed ({facts.node(id).name}: {problem})"
        yield (
            "fail",
            f"{group}; {OPEN_PORTS}, and if they have several networks, choose one with `ray start --node-ip-address`",
        )


def _all_reduce(facts: Facts) -> str:
    result = facts.all_reduce
    if result is None:
        return ""
    if len(result.nodes) < 2:
        return "the cluster has fewer than two worker nodes, so nothing was measured"
    rate, latency_ms = result.bytes_per_s / 2**30, result.latency_s * 1e3
    figures = f"{len(result.nodes)} nodes with {result.backend}: {rate:.2f} GiB/s, latency {latency_ms:.2f} ms"
    return f"{figures}; gradients of 100 M parameters take {GRADIENT_BYTES / result.bytes_per_s:.2g} s"


def _unfit_storage(facts: Facts) -> Problems:
    is_local = "://" not in facts.runs
    for problem, ids in _by_value({id: stored.problem for id, stored in facts.stored.items() if stored.problem}):
        fix = "check the bucket's name, and the instance profile and AWS_ENDPOINT_URL of these nodes"
        fix = "set --runs to a folder that these nodes can create and write to" if is_local else fix
        yield "fail", f"{_names(facts, ids)}: {problem}; {fix}"
    if apart := [id for id, stored in facts.stored.items() if not stored.problem and not stored.sees_ours]:
        fix = "set the same AWS_ENDPOINT_URL on all nodes"
        fix = "set --runs to an s3:// URL or a folder that all nodes mount" if is_local else fix
        yield "fail", f"{_names(facts, apart)}: files that the head writes to {facts.runs} do not exist there; {fix}"
    for id, (write, read) in _rates(facts).items():
        if min(write, read) < STORE_WARN_BYTES_PER_S:
            rates = f"{facts.node(id).name} writes {_rate(write)} and reads {_rate(read)} at {facts.runs}"
            fix = "use a bucket in the cluster's region, or a faster disk"
            yield (
                "warn",
                f"{rates}, so a checkpoint of 1 GiB may not be complete before the deadline of a notice; {fix}",
            )


def _rates(facts: Facts) -> dict[str, tuple[float, float]]:
    """Return the rates of writing and reading in bytes per second, by node."""
    measured = {id: stored for id, stored in facts.stored.items() if stored.bytes}
    return {id: (stored.bytes / stored.write_s, stored.bytes / stored.read_s) for id, stored in measured.items()}


def _storage(facts: Facts) -> str:
    if not (rates := _rates(facts)):
        return ""
    write, read = (min(column) for column in zip(*rates.values(), strict=True))
    slowest = f"with all nodes at once, the slowest writes {_rate(write)} and reads {_rate(read)}"
    return f"{_count(rates, 'node shares', 'nodes share')} {facts.runs}; {slowest}"


def _full_disks(facts: Facts) -> Problems:
    for id, report in facts.reports.items():
        for disk in report.disks:
            if verdict := _disk_verdict(disk):
                share = f"{disk.free_bytes / disk.total_bytes:.0%}"
                free = f"{facts.node(id).name} has {_size(disk.free_bytes)} ({share}) free at {disk.path}"
                yield verdict, f"{free}; delete old files there, or use a larger disk"


def _disk_verdict(disk: FileSystem) -> Verdict | None:
    if disk.free_bytes < max(DISK_FAIL_BYTES, DISK_FAIL_SHARE * disk.total_bytes):
        return "fail"
    return "warn" if disk.free_bytes < DISK_WARN_BYTES else None


def _disks(facts: Facts) -> str:
    least = min((disk.free_bytes for report in facts.reports.values() for disk in report.disks), default=None)
    files = "Ray's files" if "://" in facts.runs else "Ray's files and the runs"
    return f"at least {_size(least)} free for {files}" if least is not None else ""


def _small_memory(facts: Facts) -> Problems:
    for id, report in facts.reports.items():
        memory = report.memory
        if memory.free_bytes < MEMORY_WARN_BYTES:
            verdict: Verdict = "fail" if memory.free_bytes < MEMORY_FAIL_BYTES else "warn"
            free = f"{facts.node(id).name} has {_size(memory.free_bytes)} of shared memory free at {memory.path}"
            fix = "increase --shm-size of its container, or the node's memory"
            yield verdict, f"{free}, and snapshots larger than a quarter of it are not taken; {fix}"


def _memory(facts: Facts) -> str:
    least = min((report.memory.free_bytes for report in facts.reports.values()), default=None)
    if least is None:
        return ""
    return f"at least {_size(least)} of shared memory free, enough for snapshots of {_size(least / 4)} per node"


def _unreadable_notices(facts: Facts) -> Problems:
    for id, report in facts.reports.items():
        node, source = facts.node(id), report.notices
        if source.problem:
            fix = "enable its metadata service, and run containers with the network of the machine"
            problem = f"{node.name} cannot read {source.name} ({source.problem}), so a preemption would be a crash"
            yield "fail" if node.is_spot else "warn", f"{problem}; {fix}"
        elif source.notice:
            yield "warn", f"{node.name} is about to be preempted ({source.notice}); wait for the node that replaces it"
        elif node.is_spot and not source.name and not source.in_pod:
            problem = f"{node.name} is labelled spot, but it is not a machine of a supported cloud"
            yield "warn", f"{problem}; start `undula spot watch --source file:PATH` on it, or correct its label"


def _notices(facts: Facts) -> str:
    readable = {id: report.notices.name for id, report in facts.reports.items() if report.notices.name}
    parts = [f"{_count(ids, 'node reads', 'nodes read')} {name}" for name, ids in _by_value(readable)]
    pods = [id for id, report in facts.reports.items() if report.notices.in_pod]
    parts += (
        [f"{_count(pods, 'pod', 'pods')}, where only a preStop hook with `undula spot leave` passes notices on"]
        if pods
        else []
    )
    return ", ".join(parts) or ("no cloud machines, so no notices to read" if facts.reports else "")


CHECKS: Mapping[str, Check] = {
    "nodes": Check(_unresponsive_nodes, _all_nodes),
    "token": Check(_missing_token, _token),
    "versions": Check(_different_versions, _versions),
    "clocks": Check(_skewed_clocks, _clocks),
    "ports": Check(_closed_ports, _ports),
    "gpus": Check(_gpu_problems, _gpus),
    "all-reduce": Check(_failed_all_reduce, _all_reduce),
    "storage": Check(_unfit_storage, _storage),
    "disk": Check(_full_disks, _disks),
    "memory": Check(_small_memory, _memory),
    "notices": Check(_unreadable_notices, _notices),
}


def _count(things: Sized, one: str, many: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else many}"


def _names(facts: Facts, ids: Sequence[str]) -> str:
    """Return the names of the first nodes and the number of the others."""
    more = len(ids) - NAMED
    return ", ".join(facts.node(id).name for id in ids[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _by_value(values: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Group nodes by value. The value with the fewest nodes comes first, because it is probably the wrong one."""
    ids: dict[str, list[str]] = {}
    for id, value in values.items():
        ids.setdefault(value, []).append(id)
    return sorted(ids.items(), key=lambda item: len(item[1]))


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 2**20:.0f} MiB/s"
