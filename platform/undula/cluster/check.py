"""What is wrong with a cluster's configuration for training on spot nodes, and Ray's launcher does not say."""

import ipaddress
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import boto3
import yaml
from botocore.exceptions import BotoCoreError, ClientError
from jsonschema import Draft7Validator

from undula.elastic.pure.nodes import workers_that_fit
from undula.elastic.pure.spec import WorkersSpec
from undula.errors import SpecError
from undula.plan.fleet import MACHINE, MARKET, ON_DEMAND, SPOT, TYPE

WIDE_BITS = {4: 8, 6: 16}
"""A network with a shorter prefix is no organisation's, but half of the world."""
SSH = 22
ALL_PORTS = (0, 65535)
START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")
WORKERS_COMMANDS = ("setup_commands", "worker_setup_commands", "worker_start_ray_commands")
SECRET = re.compile(
    r"\b(?:[A-Z][A-Z0-9_]*_)?(?:SECRET_ACCESS_KEY|SECRET_KEY|SECRET|PASSWORD|API_KEY|TOKEN)=[\"']?[\w+.-][\w+/.-]{7}"
    r"|(?i:\baws_secret_access_key)[\s=:]+[\"']?[\w+/]{8}|\bA[KS]IA[A-Z0-9]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""What is written out, and does not come from a file or a command of the node's."""
OWN_IDENTITY = {"aws": "IamInstanceProfile", "gcp": "serviceAccounts"}
"""The field of a node's configuration that says as whom its programs ask the cloud."""


@dataclass(frozen=True)
class Finding:
    """Something to mend, in a sentence."""

    severity: Literal["error", "warning"]
    """An error costs money, data or safety; a warning costs speed."""
    message: str


@dataclass(frozen=True)
class NodeType:
    """What the configuration says of a kind of nodes."""

    name: str
    resources: Mapping[str, float]
    machine: str
    """The cloud's name of it."""
    is_spot: bool
    max_price: str | None
    is_head: bool
    labels: Mapping[str, str]
    """Of Ray's node."""
    max_workers: int
    """Nodes of it, beside the head."""


def load_cluster(path: Path) -> dict[str, Any]:
    """A cluster.yaml, as Ray's launcher reads it.

    Raises:
        SpecError: it cannot be read, or is not of Ray's schema.
    """
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SpecError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    schema = json.loads((files("ray.autoscaler") / "ray-schema.json").read_text())
    wrong = min(Draft7Validator(schema).iter_errors(config), key=lambda error: len(error.path), default=None)
    if wrong is not None:
        where = ".".join(map(str, wrong.path)) or "the file"
        raise SpecError(f"{path}: {where}: {wrong.message}")
    return config  # type: ignore[no-any-return]


def node_types(config: Mapping[str, Any]) -> list[NodeType]:
    """The kinds of nodes of a configuration."""
    found = []
    for name, each in config.get("available_node_types", {}).items():
        node = each.get("node_config", {})
        market = _mapping(node.get("InstanceMarketOptions"))
        scheduling = node.get("scheduling")
        scheduling = _mapping(scheduling[0] if scheduling and isinstance(scheduling, list) else scheduling)
        is_head = name == config.get("head_node_type")
        found.append(
            NodeType(
                name,
                each.get("resources", {}),
                node.get("InstanceType") or node.get("machineType") or "",
                market.get("MarketType") == "spot"
                or scheduling.get("preemptible") is True
                or scheduling.get("provisioningModel") == "SPOT",
                _mapping(market.get("SpotOptions")).get("MaxPrice"),
                is_head,
                each.get("labels", {}),
                each.get("max_workers", 0 if is_head else _most_nodes(config)),
            )
        )
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    """Empty for what is none: what is in a node's configuration no schema has checked."""
    return value if isinstance(value, Mapping) else {}


def _most_nodes(config: Mapping[str, Any]) -> int:
    """Beside the head; where nothing is said, Ray's own."""
    return int(config.get("max_workers", 2))


def check_cluster(
    config: Mapping[str, Any], workers: WorkersSpec | None, buckets: Sequence[str], region_of: Callable[[str], str]
) -> list[Finding]:
    """What to mend.

    Args:
        config: of the cluster, of Ray's schema.
        workers: what a job's workers need; None where no job was given.
        buckets: of S3, which the job reads and writes.
        region_of: tells a bucket's region, or raises SpecError where it cannot be told.
    """
    types = node_types(config)
    provider = config["provider"]["type"]
    findings = [*_on_ports(config), *_on_starting(config), *_on_secrets(config)]
    if not types:
        message = (
            "available_node_types: none, so that Ray launches its own, without any of what is checked here: give them"
        )
        return [Finding("error", message), *findings]
    findings = [*_on_spot(types, provider), *_on_labels(types), *findings, *_on_notices(config, types)]
    if provider == "aws":
        findings += _on_metadata(config)
    if provider in OWN_IDENTITY:
        findings += [*_on_identity(config, OWN_IDENTITY[provider]), *_on_zones(config["provider"])]
    if workers is not None:
        findings += [*_on_fit(types, workers), *_on_room(types, workers, _most_nodes(config))]
    if provider == "aws":
        findings += _on_buckets(config["provider"], buckets, region_of)
    return findings


def _on_spot(types: Sequence[NodeType], provider: str | None) -> Iterator[Finding]:
    spot = [each for each in types if each.is_spot and not each.is_head and each.max_workers]
    fallback = [each for each in types if not each.is_spot and not each.is_head and each.max_workers]
    for head in (each for each in types if each.is_head and each.is_spot):
        yield Finding(
            "error",
            f"available_node_types.{head.name}: the head is a spot node, and the whole cluster goes with it: make it on-demand",
        )
    if not spot:
        yield Finding("warning", "available_node_types: no worker is a spot node: give one a spot market")
        return
    for kind in sorted({_kind(each) for each in spot} - {_kind(each) for each in fallback}):
        yield Finding(
            "error",
            f"available_node_types: spot workers with {kind} have no on-demand type to fall back on: "
            "add one with as many, and without a spot market",
        )
    if len({each.machine for each in spot}) < 2:
        yield Finding(
            "error",
            f"available_node_types: all spot workers are {spot[0].machine}, which go together: add other types of machine",
        )
    if provider == "aws":
        for each in spot:
            if each.max_price is None:
                yield Finding(
                    "warning",
                    f"available_node_types.{each.name}: no maximum price, so that it may cost as much as on-demand: "
                    "give InstanceMarketOptions.SpotOptions.MaxPrice",
                )


def _kind(node: NodeType) -> str:
    return f"{node.resources.get('GPU', 0):g} GPU" if node.resources.get("GPU") else "CPUs alone"


LABELLED_FOR = {
    MARKET: "its nodes are taken for no market's",
    MACHINE: "its nodes have no price",
    TYPE: "nobody asks for another type where it is not to be had",
}


def _on_labels(types: Sequence[NodeType]) -> Iterator[Finding]:
    for each in types:
        wanted = {MARKET: SPOT if each.is_spot else ON_DEMAND, MACHINE: each.machine, TYPE: each.name}
        for label, value in wanted.items():
            found = each.labels.get(label)
            if found is None:
                yield Finding(
                    "warning",
                    f"available_node_types.{each.name}: no label {label}, so that {LABELLED_FOR[label]}: "
                    f"give labels: {{{label}: {value}}}",
                )
            elif found != value:
                yield Finding(
                    "error",
                    f"available_node_types.{each.name}: the label {label} is {found}, and the nodes are {value}: correct one of them",
                )


def _on_identity(config: Mapping[str, Any], field: str) -> Iterator[Finding]:
    """Head and workers as whom they ask the cloud."""
    head_type = config.get("head_node_type")
    nodes = {name: each.get("node_config", {}).get(field) for name, each in config["available_node_types"].items()}
    if head_type not in nodes:
        return  # Ray says so
    head = nodes.pop(head_type)
    if head is None:
        yield Finding(
            "warning",
            f"available_node_types.{head_type}: no {field}, so that Ray makes one with nearly every right: give one of your own",
        )
    elif same := [name for name, each in nodes.items() if each == head]:
        yield Finding(
            "warning",
            f"available_node_types.{same[0]}: {field} is the head's, and with it every job may launch and end machines: give workers one "
            "of their own",
        )


def _on_ports(config: Mapping[str, Any]) -> Iterator[Finding]:
    for rule in map(_mapping, config["provider"].get("security_group", {}).get("IpPermissions", [])):
        found = [_mapping(each) for key in ("IpRanges", "Ipv6Ranges") for each in rule.get(key) or ()]
        ranges = [each.get("CidrIp") or each.get("CidrIpv6") for each in found]
        protocol, ports = str(rule.get("IpProtocol")), (rule.get("FromPort", 0), rule.get("ToPort", 65535))
        if protocol == "-1":
            ports = ALL_PORTS  # whatever else the rule says
        if any(map(_is_wide, ranges)) and ports != (SSH, SSH) and not protocol.startswith("icmp"):
            yield Finding(
                "error",
                f"provider.security_group: ports {ports[0]} to {ports[1]} are open to everybody: leave the rule out, and reach them by SSH",
            )


def _is_wide(network: Any) -> bool:
    try:
        found = ipaddress.ip_network(str(network), strict=False)
    except ValueError:
        return False  # EC2 refuses it
    return found.prefixlen < WIDE_BITS[found.version]


def _on_starting(config: Mapping[str, Any]) -> Iterator[Finding]:
    for key in START_COMMANDS:
        if not config.get(key):
            yield Finding(
                "error",
                f"{key}: none, and Ray's own start it without its token, for anybody to run code, with its dashboard on every interface: "
                "give them, with RAY_AUTH_MODE=token before `ray start`",
            )
    for command in (command for key in START_COMMANDS for command in config.get(key, [])):
        if "ray start" in command and "RAY_AUTH_MODE=token" not in command:
            yield Finding(
                "error",
                f"'{_short(command)}' starts Ray without its token, for anybody to run code: put RAY_AUTH_MODE=token before it",
            )
        if "ray start" in command and re.search(r"--dashboard-host[= ]0\.0\.0\.0", command):
            yield Finding(
                "warning",
                "head_start_ray_commands: the dashboard listens on every interface: say --dashboard-host=127.0.0.1, and `ray dashboard`",
            )


def _on_secrets(config: Mapping[str, Any]) -> Iterator[Finding]:
    copied = "Ray copies this file to the head and into its log: leave it out, and give nodes an identity"
    for secret in ("aws_credentials", "gcp_credentials"):
        if secret in config["provider"]:
            yield Finding("error", f"provider.{secret}: {copied}")
    for key, value in config.items():
        if any(SECRET.search(text) for text in _texts(value)):
            yield Finding("error", f"{key}: a secret is written there, and {copied}")


def _texts(value: Any) -> Iterator[str]:
    """All that a value of the file has in it; of a mapping as NAME=VALUE."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from [f"{name}={each}"] if isinstance(each, str) else _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def _on_metadata(config: Mapping[str, Any]) -> Iterator[Finding]:
    for name, each in config["available_node_types"].items():
        if _mapping(each["node_config"].get("MetadataOptions")).get("HttpTokens") != "required":
            yield Finding(
                "warning",
                f"available_node_types.{name}: whoever makes a program there fetch a URL gets the node's rights: "
                "give MetadataOptions: {HttpTokens: required}",
            )


def _short(command: str) -> str:
    return command if len(command) <= 60 else f"{command[:57]}..."


def _on_notices(config: Mapping[str, Any], types: Sequence[NodeType]) -> Iterator[Finding]:
    commands = [command for key in WORKERS_COMMANDS for command in config.get(key, [])]
    if any(each.is_spot for each in types) and not any(map(_starts_watcher, commands)):
        yield Finding(
            "error",
            "worker_start_ray_commands: no spot watcher is started, so that each preemption is a crash: start `undula spot watch`",
        )


def _starts_watcher(command: str) -> bool:
    """To copy its service, or to enable it for the next boot, is not to start it."""
    for part in re.split(r"[;&|\n]", command):
        is_started = "systemctl" in part and re.search(r"\b(re)?start\b|--now\b", part)
        if "spot watch" in part or ("undula-spot-watch" in part and is_started):
            return True
    return False


def _on_fit(types: Sequence[NodeType], workers: WorkersSpec) -> Iterator[Finding]:
    needs = {"CPU": workers.cpus, "GPU": workers.gpus, **workers.resources}
    for each in types:
        if not each.is_head and not workers_that_fit(each.resources, needs):
            short = [f"{amount:g} {name}" for name, amount in needs.items() if each.resources.get(name, 0) < amount]
            yield Finding(
                "error",
                f"available_node_types.{each.name}: no worker of the job fits, as it needs {', '.join(short)}: "
                "lower workers.cpus or workers.gpus, or use a larger machine",
            )


def _on_room(types: Sequence[NodeType], workers: WorkersSpec, most_nodes: int) -> Iterator[Finding]:
    """Whether the cluster may have as many nodes as the job cannot do without; not known where Ray finds out a type's resources."""
    needs = {"CPU": workers.cpus, "GPU": workers.gpus, **workers.resources}
    if any(not each.resources for each in types):
        return
    fleet = workers.fleet
    room = _room([each for each in types if each.is_spot or not fleet.spot_only], needs, most_nodes)
    if room < workers.min and any(workers_that_fit(each.resources, needs) for each in types):
        yield Finding(
            "error",
            f"max_workers: the cluster has room for {room} workers, and the job waits for workers.min, {workers.min}: "
            "raise max_workers, of the types and of the cluster, or lower workers.min",
        )
    wanted = workers.max if fleet.deadline else fleet.on_demand_floor or 0
    if (on_demand := _room([each for each in types if not each.is_spot], needs, most_nodes)) < wanted:
        what = "workers.fleet.deadline may need" if fleet.deadline else "workers.fleet.on_demand_floor wants"
        yield Finding(
            "warning",
            f"max_workers: on-demand types have room for {on_demand} workers, and {what} {wanted} there: raise their max_workers",
        )


def _room(types: Sequence[NodeType], needs: Mapping[str, float], most_nodes: int) -> int:
    """Workers that fit on the head and on as many nodes as there may be, the largest first."""
    room = sum(workers_that_fit(each.resources, needs) for each in types if each.is_head)
    fits = {each.name: workers_that_fit(each.resources, needs) for each in types}
    for each in sorted(types, key=lambda each: -fits[each.name]):
        if not each.is_head:
            nodes = min(each.max_workers, most_nodes)
            room, most_nodes = room + nodes * fits[each.name], most_nodes - nodes
    return room


def _on_zones(provider: Mapping[str, Any]) -> Iterator[Finding]:
    region = provider.get("region") or ""
    for zone in (provider.get("availability_zone") or "").split(","):
        if zone and not zone.strip().startswith(region):
            yield Finding(
                "error", f"provider.availability_zone: {zone.strip()} is not in {region}: name zones of the region"
            )


def _on_buckets(
    provider: Mapping[str, Any], buckets: Sequence[str], region_of: Callable[[str], str]
) -> Iterator[Finding]:
    region = provider.get("region", "")
    for bucket in sorted(set(buckets)):
        try:
            found = region_of(bucket)
        except SpecError as error:
            yield Finding("warning", f"s3://{bucket}: its region could not be found out: {error}")
            continue
        if found != region:
            yield Finding(
                "error",
                f"s3://{bucket} is in {found} and the cluster in {region}, so that every byte is paid for: use a bucket of {region}",
            )


def region_of(bucket: str) -> str:
    """Of an S3 bucket, as anybody with access to it may ask.

    Raises:
        SpecError: it does not say.
    """
    try:
        found = boto3.client("s3").head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
    except (BotoCoreError, ClientError) as error:
        raise SpecError(" ".join(str(error).split())) from None
    return str(found.get("x-amz-bucket-region", "us-east-1"))
