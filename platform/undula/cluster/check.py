"""Check of a Ray cluster configuration (cluster.yaml) for problems with training on spot nodes that Ray's launcher does not report."""

import ipaddress
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import boto3
import yaml
from botocore.exceptions import BotoCoreError, ClientError
from jsonschema import Draft7Validator

from undula.cluster.job_fit import check_job
from undula.cluster.node_types import NodeType, mapping_of, most_nodes, node_types
from undula.elastic.pure.spec import WorkersSpec
from undula.errors import Finding, SpecError, one_line
from undula.masking.values import mask
from undula.plan.fleet import MACHINE, MARKET, ON_DEMAND, SPOT, TYPE

WIDE_BITS = {4: 8, 6: 16}
"""Prefix length in bits, by IP version, below which a network counts as open to everybody. No organisation has a network this large."""
SSH = 22
ALL_PORTS = (0, 65535)
START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")
WORKERS_COMMANDS = ("setup_commands", "worker_setup_commands", "worker_start_ray_commands")
OWN_IDENTITY = {"aws": "IamInstanceProfile", "gcp": "serviceAccounts"}
"""Field of a node's configuration that sets the identity of its programs for requests to the cloud, by provider."""


def load_cluster(path: Path) -> dict[str, Any]:
    """Read a cluster.yaml as Ray's launcher does.

    Raises:
        SpecError: The file cannot be read or does not match Ray's schema.
    """
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SpecError(f"{path} cannot be read: {one_line(error)}") from None
    schema = json.loads((files("ray.autoscaler") / "ray-schema.json").read_text())
    wrong = min(Draft7Validator(schema).iter_errors(config), key=lambda error: len(error.path), default=None)
    if wrong is not None:
        where = ".".join(map(str, wrong.path)) or "the file"
        raise SpecError(f"{path}: {where}: {wrong.message}")
    return config  # type: ignore[no-any-return]


def check_cluster(
    config: Mapping[str, Any], workers: WorkersSpec | None, buckets: Sequence[str], region_of: Callable[[str], str]
) -> list[Finding]:
    """Check a configuration and return its problems.

    Args:
        config: Configuration of the cluster that matches Ray's schema.
        workers: Resources that the workers of a job need; None without a job.
        buckets: Names of the S3 buckets that the job reads and writes.
        region_of: Function that returns the region of a bucket, or raises SpecError if it is not known.
    """
    types = node_types(config)
    provider = config["provider"]["type"]
    findings = [*_check_ports(config), *_check_starting(config), *_check_secrets(config)]
    if not types:
        message = "available_node_types is missing, so Ray would launch nodes of its default types, which this check does not cover; add it"
        return [Finding("error", message), *findings]
    findings = [*_check_spot(types, provider), *_check_labels(types), *findings, *_check_notices(config, types)]
    if provider == "aws":
        findings += _check_metadata(config)
    if provider in OWN_IDENTITY:
        findings += [*_check_identity(config, OWN_IDENTITY[provider]), *_check_zones(config["provider"])]
    if workers is not None:
        findings += check_job(types, workers, most_nodes(config))
    if provider == "aws":
        findings += _check_buckets(config["provider"], buckets, region_of)
    return findings


def _check_spot(types: Sequence[NodeType], provider: str | None) -> Iterator[Finding]:
    spot = [node for node in types if node.is_spot and not node.is_head and node.max_workers]
    fallback = [node for node in types if not node.is_spot and not node.is_head and node.max_workers]
    for head in (node for node in types if node.is_head and node.is_spot):
        yield Finding(
            "error",
            f"available_node_types.{head.name}: the head is a spot node, and a preemption of the head ends the whole cluster; make it "
            "on-demand",
        )
    if not spot:
        yield Finding("warning", "available_node_types: no worker type is a spot type; give one a spot market")
        return
    for kind in sorted({_kind(node) for node in spot} - {_kind(node) for node in fallback}):
        yield Finding(
            "error",
            f"available_node_types: spot workers with {kind} have no on-demand type to fall back on; "
            "add a type with the same resources and without a spot market",
        )
    if len({node.machine for node in spot}) < 2:
        yield Finding(
            "error",
            f"available_node_types: all spot workers are {spot[0].machine}, so the cloud can preempt all of them at once; add other "
            "machine types",
        )
    if provider == "aws":
        for node in spot:
            if node.max_price is None:
                yield Finding(
                    "warning",
                    f"available_node_types.{node.name}: no maximum price is set, so a node can cost as much as on-demand; "
                    "set InstanceMarketOptions.SpotOptions.MaxPrice",
                )


def _kind(node: NodeType) -> str:
    return f"{node.resources.get('GPU', 0):g} GPU" if node.resources.get("GPU") else "CPUs only"


LABELLED_FOR = {
    MARKET: "Undula does not know whether its nodes are spot nodes",
    MACHINE: "Undula does not know the price of its nodes",
    TYPE: "Undula cannot request another type when this one is not available",
}
"""Consequence of each missing label, for messages."""


def _check_labels(types: Sequence[NodeType]) -> Iterator[Finding]:
    for node in types:
        wanted = {MARKET: SPOT if node.is_spot else ON_DEMAND, MACHINE: node.machine, TYPE: node.name}
        for label, value in wanted.items():
            given = node.labels.get(label)
            if given is None:
                yield Finding(
                    "warning",
                    f"available_node_types.{node.name}: the label {label} is missing, so {LABELLED_FOR[label]}; "
                    f"add labels: {{{label}: {value}}}",
                )
            elif given != value:
                yield Finding(
                    "error",
                    f"available_node_types.{node.name}: the label {label} is {given}, but the nodes are {value}; correct one of them",
                )


def _check_identity(config: Mapping[str, Any], field: str) -> Iterator[Finding]:
    """Check the identities that the head and the workers use for requests to the cloud."""
    head_type = config.get("head_node_type")
    nodes = {
        name: node_type.get("node_config", {}).get(field) for name, node_type in config["available_node_types"].items()
    }
    if head_type not in nodes:
        return  # Ray reports this itself
    head = nodes.pop(head_type)
    if head is None:
        yield Finding(
            "warning",
            f"available_node_types.{head_type}: {field} is missing, so Ray creates one with nearly all permissions; set your own",
        )
    elif same := [name for name, identity in nodes.items() if identity == head]:
        yield Finding(
            "warning",
            f"available_node_types.{same[0]}: {field} is the same as the head's, so every job can launch and terminate machines; give the "
            "workers their own",
        )


def _check_ports(config: Mapping[str, Any]) -> Iterator[Finding]:
    for rule in map(mapping_of, config["provider"].get("security_group", {}).get("IpPermissions", [])):
        entries = [mapping_of(entry) for key in ("IpRanges", "Ipv6Ranges") for entry in rule.get(key) or ()]
        ranges = [entry.get("CidrIp") or entry.get("CidrIpv6") for entry in entries]
        protocol, ports = str(rule.get("IpProtocol")), (rule.get("FromPort", 0), rule.get("ToPort", 65535))
        if protocol == "-1":
            ports = ALL_PORTS  # a rule for all protocols ignores its port range
        if any(map(_is_wide, ranges)) and ports != (SSH, SSH) and not protocol.startswith("icmp"):
            yield Finding(
                "error",
                f"provider.security_group: ports {ports[0]} to {ports[1]} are open to everybody; remove the rule and use an SSH tunnel",
            )


def _is_wide(network: Any) -> bool:
    try:
        parsed = ipaddress.ip_network(str(network), strict=False)
    except ValueError:
        return False  # EC2 rejects this itself
    return parsed.prefixlen < WIDE_BITS[parsed.version]


def _check_starting(config: Mapping[str, Any]) -> Iterator[Finding]:
    for key in START_COMMANDS:
        if not config.get(key):
            yield Finding(
                "error",
                f"{key} is missing, and Ray's default commands start Ray without authentication and with its dashboard on every interface, "
                "so that anybody can run code; add commands with RAY_AUTH_MODE=token before `ray start`",
            )
    for command in (command for key in START_COMMANDS for command in config.get(key, [])):
        if "ray start" in command and "RAY_AUTH_MODE=token" not in command:
            yield Finding(
                "error",
                f"'{_short(command)}' starts Ray without authentication, so that anybody can run code; put RAY_AUTH_MODE=token before it",
            )
        if "ray start" in command and re.search(r"--dashboard-host[= ]0\.0\.0\.0", command):
            yield Finding(
                "warning",
                "head_start_ray_commands: the dashboard listens on every interface; set --dashboard-host=127.0.0.1 and open it with "
                "`ray dashboard`",
            )


def _check_secrets(config: Mapping[str, Any]) -> Iterator[Finding]:
    copied = "Ray copies this file to the head and into its log; remove the secret and give the nodes an identity"
    for secret in ("aws_credentials", "gcp_credentials"):
        if secret in config["provider"]:
            yield Finding("error", f"provider.{secret}: {copied}")
    for key, value in config.items():
        if any(mask(text) != text for text in _texts(value)):
            yield Finding("error", f"{key} contains a secret, and {copied}")


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a value of the file. Entries of a mapping are yielded as NAME=VALUE."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from [f"{name}={entry}"] if isinstance(entry, str) else _texts(entry)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


def _check_metadata(config: Mapping[str, Any]) -> Iterator[Finding]:
    for name, node_type in config["available_node_types"].items():
        if mapping_of(node_type["node_config"].get("MetadataOptions")).get("HttpTokens") != "required":
            yield Finding(
                "warning",
                f"available_node_types.{name}: a program on the node that is tricked into fetching a URL can leak the node's credentials; "
                "set MetadataOptions: {HttpTokens: required}",
            )


def _short(command: str) -> str:
    return command if len(command) <= 60 else f"{command[:57]}..."


def _check_notices(config: Mapping[str, Any], types: Sequence[NodeType]) -> Iterator[Finding]:
    commands = [command for key in WORKERS_COMMANDS for command in config.get(key, [])]
    if any(node.is_spot for node in types) and not any(map(_starts_watcher, commands)):
        yield Finding(
            "error",
            "worker_start_ray_commands do not start the spot watcher, so each preemption is a crash; start `undula spot watch`",
        )


def _starts_watcher(command: str) -> bool:
    """Return whether a command starts the spot watcher. Commands that copy its service file or enable it for the next boot do not count."""
    for part in re.split(r"[;&|\n]", command):
        is_started = "systemctl" in part and re.search(r"\b(re)?start\b|--now\b", part)
        if "spot watch" in part or ("undula-spot-watch" in part and is_started):
            return True
    return False


def _check_zones(provider: Mapping[str, Any]) -> Iterator[Finding]:
    region = provider.get("region") or ""
    for zone in (provider.get("availability_zone") or "").split(","):
        if zone and not zone.strip().startswith(region):
            yield Finding(
                "error", f"provider.availability_zone: {zone.strip()} is not in {region}; use zones of the region"
            )


def _check_buckets(
    provider: Mapping[str, Any], buckets: Sequence[str], region_of: Callable[[str], str]
) -> Iterator[Finding]:
    region = provider.get("region", "")
    for bucket in sorted(set(buckets)):
        try:
            actual = region_of(bucket)
        except SpecError as error:
            yield Finding(
                "warning", f"s3://{bucket}: the region of the bucket is not known ({error}); check your access to it"
            )
            continue
        if actual != region:
            yield Finding(
                "error",
                f"s3://{bucket} is in {actual} but the cluster is in {region}, so all traffic between them costs money; use a bucket in "
                f"{region}",
            )


def region_of(bucket: str) -> str:
    """Return the region of an S3 bucket.

    Raises:
        SpecError: The request failed, for example because access is denied.
    """
    try:
        headers = boto3.client("s3").head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
    except (BotoCoreError, ClientError) as error:
        raise SpecError(one_line(error)) from None
    return str(headers.get("x-amz-bucket-region", "us-east-1"))
