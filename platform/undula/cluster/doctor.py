"""What an examination's facts mean: for each check whether it passes, and in one sentence how to mend what does not."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Literal

from undula.cluster.facts import Facts, Room

Verdict = Literal["pass", "warn", "fail"]
Problems = Iterator[tuple[Verdict, str]]

SKEW_WARN_S = 0.5
SKEW_FAIL_S = 5.0
"""Deadlines of notices are wall-clock times, and the shortest notice is 30 s: of this much less a step and a save may not fit."""
DISK_WARN_BYTES = 10 * 2**30
"""A checkpoint of 350 M parameters with AdamW is 4 GiB, and the former one goes only when the next is whole."""
DISK_FAIL_BYTES = 2**30
DISK_FAIL_SHARE = 0.05
"""Below so much of a disk Ray refuses to spill objects (its local_fs_capacity_threshold)."""
MEMORY_WARN_BYTES = 2 * 2**30
"""Two slots go into half of it at most: 512 MiB of state, which is AdamW of 45 M parameters."""
MEMORY_FAIL_BYTES = 128 * 2**20
"""Docker gives 64 MiB where it is not asked: NCCL's buffers and Ray's objects do not fit."""
STORE_WARN_BYTES_PER_S = 10 * 2**20
"""1 GiB of checkpoint then takes most of the 2 minutes that AWS's notice gives."""
GRADIENT_BYTES = 4 * 100_000_000
OPEN_PORTS = "let the cluster's nodes reach each other on all TCP ports (a rule of their security group with the group as its source)"
MAY_BE_MISSING = {
    "undula": "`undula run` brings it along, but a script that is run without it, and the spot watcher, need it there",
    "horovod": "run `undula build-horovod` there, or leave engine: horovod",
}
UNMEASURED = "not measured, or not on all nodes, as no time was left: mend what took it, and ask again"
NAMED = 4
"""Nodes or pairs that are told one by one."""


@dataclass(frozen=True)
class Result:
    """One line of the doctor's."""

    check: str
    verdict: Verdict
    message: str


@dataclass(frozen=True)
class Check:
    """Something that has to be so."""

    problems: Callable[[Facts], Problems]
    """What is wrong, each with its mend."""
    summary: Callable[[Facts], str]
    """What there is where nothing is wrong; empty where it is not known."""


def judge(facts: Facts) -> list[Result]:
    """Every check, in the order in which one would mend."""
    results = []
    for name, check in CHECKS.items():
        problems = [Result(name, verdict, message) for verdict, message in check.problems(facts)]
        if name in facts.unmeasured:
            problems.append(Result(name, "warn", UNMEASURED))
        summary = "" if problems else check.summary(facts)
        results += [*problems, *([Result(name, "pass", summary)] if summary else [])]
    return results


def _silent_nodes(facts: Facts) -> Problems:
    mend = (
        "look whether it is up (`ray list nodes`), and at its raylet's log (/tmp/ray/session_latest/logs there), or end "
        "the machine, for Ray to replace it"
    )
    for id, why in facts.silent.items():
        yield "fail", f"{facts.node(id).name} could not be examined to the end: {why}: {mend}"
    if not any(node.trains for node in facts.nodes):
        mend = "have one started first (min_workers of cluster.yaml, or ray.autoscaler.sdk.request_resources)"
        yield "warn", f"no node that trains is up, and nothing is known of those to come: {mend}"


def _all_nodes(facts: Facts) -> str:
    return f"{_count(facts.nodes, 'node answers', 'nodes answer')}, and workers fit on {sum(node.trains for node in facts.nodes)}"


def _missing_token(facts: Facts) -> Problems:
    if facts.dashboard_status is None:
        why = "the dashboard does not answer on the head, so that it is not known whether Ray wants a token"
        if "token" not in facts.unmeasured:
            yield "warn", f"{why}: start Ray without --include-dashboard=false"
    elif facts.dashboard_status not in (401, 403):
        mend = "start it on all nodes with RAY_AUTH_MODE=token, and a token of `ray get-auth-token --generate`"
        yield "fail", f"Ray lets in who has no token (status {facts.dashboard_status}), to run any code: {mend}"


def _token(facts: Facts) -> str:
    return f"Ray turns away who has no token (status {facts.dashboard_status})"


def _packages(facts: Facts) -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """Each with its versions by node, and the nodes without it."""
    for package in dict.fromkeys(name for look in facts.looks.values() for name in look.versions):
        found = {id: look.versions.get(package) for id, look in facts.looks.items()}
        installed = {id: version for id, version in found.items() if version is not None}
        if installed or package not in MAY_BE_MISSING:
            yield package, installed, [id for id in found if id not in installed]


def _different_versions(facts: Facts) -> Problems:
    for package, versions, missing in _packages(facts):
        if _differ(facts, versions) or (missing and package not in MAY_BE_MISSING):
            found = [*_by_value(versions), *([("none", missing)] if missing else [])]
            where = "; ".join(f"{version} on {_names(facts, ids)}" for version, ids in found)
            yield "fail", f"{package} is {where}: install one version on all nodes (setup_commands of cluster.yaml)"
        elif missing:
            yield "warn", f"{package} is not installed on {_names(facts, missing)}: {MAY_BE_MISSING[package]}"


def _differ(facts: Facts, versions: Mapping[str, str]) -> bool:
    """On a node that trains nothing the build does not matter: a head without GPUs may have torch for CPUs."""
    builds = {version for id, version in versions.items() if facts.node(id).trains}
    return len(builds) > 1 or len({version.partition("+")[0] for version in versions.values()}) > 1


def _versions(facts: Facts) -> str:
    """Of the nodes that train, where there are any."""
    first = {package: max(found, key=lambda id: facts.node(id).trains) for package, found, _ in _packages(facts)}
    return ", ".join(f"{package} {facts.looks[id].versions[package]}" for package, id in first.items())


def _skewed_clocks(facts: Facts) -> Problems:
    for id, clock in facts.clocks.items():
        sure_s = abs(clock.offset_s) - clock.round_trip_s / 2
        if sure_s > SKEW_WARN_S:
            words = f"{abs(clock.offset_s):.1f} s {'ahead of' if clock.offset_s > 0 else 'behind'} this machine's"
            mend = "notices' deadlines are wall-clock times: start chrony there, or `timedatectl set-ntp true`"
            verdict: Verdict = "fail" if sure_s > SKEW_FAIL_S else "warn"
            yield verdict, f"the clock of {facts.node(id).name} is {words}, and {mend}"


def _clocks(facts: Facts) -> str:
    most_s = max((abs(clock.offset_s) + clock.round_trip_s / 2 for clock in facts.clocks.values()), default=None)
    return f"within {most_s * 1e3:.1f} ms of this machine's" if most_s is not None else ""


def _closed_ports(facts: Facts) -> Problems:
    for count, each in enumerate(facts.unreached[:NAMED], start=1):
        more = len(facts.unreached) - NAMED if count == NAMED else 0
        rest = f", and so for {more} more pairs" if more > 0 else ""
        pair = f"{facts.node(each.source).name} cannot reach {facts.node(each.target).name} ({each.problem}){rest}"
        yield "fail", f"{pair}: {OPEN_PORTS}"


def _ports(facts: Facts) -> str:
    if len(facts.looks) < 2:
        return "one node: there is nothing to connect" if facts.looks else ""
    return "every node reaches every other, on a port that its system chose"


def _unsound_gpus(facts: Facts) -> Problems:
    for id, look in facts.looks.items():
        node = facts.node(id)
        if look.gpus_seen < node.gpus:
            mend = "look at nvidia-smi and the driver there" if look.cuda else "install a build of torch with CUDA"
            yield "fail", f"{node.name} has GPU: {node.gpus:g} for Ray, and torch sees {look.gpus_seen}: {mend}"
        elif look.gpus_seen > node.gpus:
            mend = "give GPU in the resources of its node type, or `ray start --num-gpus`"
            yield "warn", f"{node.name} has GPU: {node.gpus:g} for Ray, and torch sees {look.gpus_seen}: {mend}"
        for gpu in facts.gpus.get(id, ()):
            if gpu.problem and gpu.is_full:
                mend = "end what holds it, unless that is a job of yours"
                yield "warn", f"{gpu.name} of {node.name} was not tried, as {gpu.problem}: {mend}"
            elif gpu.problem:
                yield "fail", f"{gpu.name} of {node.name}: {gpu.problem}: end the machine, for Ray to replace it"


def _gpus(facts: Facts) -> str:
    gpus = [gpu for found in facts.gpus.values() for gpu in found]
    if gpus:
        return f"{_count(gpus, 'GPU multiplies', 'GPUs multiply')} matrices rightly"
    return "no GPUs in the cluster" if facts.looks else ""


def _no_group(facts: Facts) -> Problems:
    found = facts.all_reduce
    if found and found.problems:
        id, problem = next(iter(found.problems.items()))
        group = f"{len(found.nodes)} nodes cannot reduce with {found.backend}; {facts.node(id).name}: {problem}"
        interface = "NCCL_SOCKET_IFNAME" if found.backend == "nccl" else "GLOO_SOCKET_IFNAME"
        yield "fail", f"{group}: {OPEN_PORTS}, and where they have several networks name the interface in {interface}"


def _all_reduce(facts: Facts) -> str:
    found = facts.all_reduce
    if found is None:
        return ""
    if len(found.nodes) < 2:
        return "fewer than two nodes train: there is nothing to measure between"
    rate, latency_ms = found.bytes_per_s / 2**30, found.latency_s * 1e3
    figures = f"{len(found.nodes)} nodes with {found.backend}: {rate:.2f} GiB/s, latency {latency_ms:.2f} ms"
    return f"{figures}; gradients of 100 M parameters take {GRADIENT_BYTES / found.bytes_per_s:.2g} s"


def _unfit_storage(facts: Facts) -> Problems:
    is_local = "://" not in facts.runs
    for problem, ids in _by_value({id: each.problem for id, each in facts.stored.items() if each.problem}):
        mend = "look at the bucket's name, the instance profile and AWS_ENDPOINT_URL there"
        mend = "give in --runs a folder that can be made and written to there" if is_local else mend
        yield "fail", f"{_names(facts, ids)}: {problem}: {mend}"
    if apart := [id for id, each in facts.stored.items() if not each.problem and not each.sees_ours]:
        mend = "give all nodes the same AWS_ENDPOINT_URL"
        mend = "give in --runs an s3:// URL, or a folder that all nodes mount" if is_local else mend
        what = f"what the head writes to {facts.runs} is not seen on {_names(facts, apart)}, where a run would not find itself"
        yield "fail", f"{what}: {mend}"
    for id, (write, read) in _rates(facts).items():
        if min(write, read) < STORE_WARN_BYTES_PER_S:
            rates = f"{facts.node(id).name} writes {_rate(write)} and reads {_rate(read)} at {facts.runs}"
            mend = "use a bucket of the cluster's region, or a faster disk"
            yield "warn", f"{rates}, so that 1 GiB of checkpoint hardly fits into a notice: {mend}"


def _rates(facts: Facts) -> dict[str, tuple[float, float]]:
    """Bytes per second of writing and reading, by node."""
    found = {id: each for id, each in facts.stored.items() if each.bytes}
    return {id: (each.bytes / each.write_s, each.bytes / each.read_s) for id, each in found.items()}


def _storage(facts: Facts) -> str:
    if not (rates := _rates(facts)):
        return ""
    write, read = (min(each) for each in zip(*rates.values(), strict=True))
    slowest = f"at once, the slowest writes {_rate(write)} and reads {_rate(read)}"
    return f"{_count(rates, 'node shares', 'nodes share')} {facts.runs}; {slowest}"


def _full_disks(facts: Facts) -> Problems:
    for id, look in facts.looks.items():
        for room in look.rooms:
            if verdict := _disk_verdict(room):
                share = f"{room.free_bytes / room.total_bytes:.0%}"
                free = f"{facts.node(id).name} has {_size(room.free_bytes)} ({share}) free at {room.path}"
                yield verdict, f"{free}: delete what is old there, or give it a larger disk"


def _disk_verdict(room: Room) -> Verdict | None:
    if room.free_bytes < max(DISK_FAIL_BYTES, DISK_FAIL_SHARE * room.total_bytes):
        return "fail"
    return "warn" if room.free_bytes < DISK_WARN_BYTES else None


def _disks(facts: Facts) -> str:
    least = min((room.free_bytes for look in facts.looks.values() for room in look.rooms), default=None)
    whose = "Ray's files" if "://" in facts.runs else "Ray's files and the runs"
    return f"at least {_size(least)} free for {whose}" if least is not None else ""


def _small_memory(facts: Facts) -> Problems:
    for id, look in facts.looks.items():
        if look.memory.free_bytes < MEMORY_WARN_BYTES:
            verdict: Verdict = "fail" if look.memory.free_bytes < MEMORY_FAIL_BYTES else "warn"
            free = (
                f"{facts.node(id).name} has {_size(look.memory.free_bytes)} of shared memory free at {look.memory.path}"
            )
            mend = "give its container a larger --shm-size, or the node more memory"
            yield verdict, f"{free}, and snapshots of more than a quarter of it are left out: {mend}"


def _memory(facts: Facts) -> str:
    least = min((look.memory.free_bytes for look in facts.looks.values()), default=None)
    return (
        f"at least {_size(least)} of it is free: snapshots of {_size(least / 4)} a node fit"
        if least is not None
        else ""
    )


def _unread_notices(facts: Facts) -> Problems:
    for id, look in facts.looks.items():
        node, source = facts.node(id), look.notices
        if source.problem:
            mend = "turn its metadata service on, and run a container with the machine's own network"
            why = f"{node.name} cannot read {source.name} ({source.problem}), and its preemption would be a crash"
            yield "fail" if node.is_spot else "warn", f"{why}: {mend}"
        elif source.notice:
            yield "warn", f"{node.name} is about to go ({source.notice}): wait for the node that replaces it"
        elif node.is_spot and not source.name and not source.in_pod:
            why = f"{node.name} is labelled spot, and belongs to no cloud whose notices are known"
            yield "warn", f"{why}: start `undula spot watch --source file:PATH` there, or correct its label"


def _notices(facts: Facts) -> str:
    readable = {id: look.notices.name for id, look in facts.looks.items() if look.notices.name}
    found = [f"{_count(ids, 'node reads', 'nodes read')} {name}" for name, ids in _by_value(readable)]
    pods = [id for id, look in facts.looks.items() if look.notices.in_pod]
    found += [f"{_count(pods, 'pod learns', 'pods learn')} of a notice by being ended"] if pods else []
    return ", ".join(found) or ("not a cloud machine, nothing to read" if facts.looks else "")


CHECKS: Mapping[str, Check] = {
    "nodes": Check(_silent_nodes, _all_nodes),
    "token": Check(_missing_token, _token),
    "versions": Check(_different_versions, _versions),
    "clocks": Check(_skewed_clocks, _clocks),
    "ports": Check(_closed_ports, _ports),
    "gpus": Check(_unsound_gpus, _gpus),
    "all-reduce": Check(_no_group, _all_reduce),
    "storage": Check(_unfit_storage, _storage),
    "disk": Check(_full_disks, _disks),
    "memory": Check(_small_memory, _memory),
    "notices": Check(_unread_notices, _notices),
}


def _count(things: Sized, one: str, many: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else many}"


def _names(facts: Facts, ids: Sequence[str]) -> str:
    """The first ones' names, and how many more there are."""
    more = len(ids) - NAMED
    return ", ".join(facts.node(id).name for id in ids[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _by_value(found: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Each value with the ids of the nodes that have it, that of the fewest first: it is the odd one."""
    ids: dict[str, list[str]] = {}
    for id, value in found.items():
        ids.setdefault(value, []).append(id)
    return sorted(ids.items(), key=lambda item: len(item[1]))


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 2**20:.0f} MiB/s"
