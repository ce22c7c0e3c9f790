"""Tests of `undula cluster check`: it finds each mistake, and none in the configurations that ship."""

from pathlib import Path
from typing import Any

import pytest

from undula.cluster.check import check_cluster, load_cluster
from undula.cluster.node_types import node_types
from undula.elastic.pure.spec import WorkersSpec
from undula.errors import Finding, SpecError
from undula.plan.fleet import FleetSpec

ROOT = Path(__file__).parents[3]
OURS = ROOT / "cluster.yaml"
ON_GOOGLE = ROOT / "docs" / "cluster-gcp.yaml"
WORKERS = WorkersSpec(gpus=1, cpus=4)


@pytest.fixture
def config() -> dict[str, Any]:
    return load_cluster(OURS)


def region_of(bucket: str) -> str:
    if bucket == "secret":
        raise SpecError("access denied")
    return {"near": "us-west-2", "far": "eu-west-1"}[bucket]


def findings_in(config: dict[str, Any], workers: WorkersSpec = WORKERS, *buckets: str) -> list[Finding]:
    return check_cluster(config, workers, buckets, region_of)


def test_cluster_yaml_has_no_findings(config: dict[str, Any]) -> None:
    assert findings_in(config, WORKERS, "near") == []
    kinds = node_types(config)
    assert len({kind.machine for kind in kinds if kind.is_spot}) >= 4
    assert [kind.is_spot for kind in kinds if kind.is_head] == [False]


def test_the_configuration_for_google_cloud_has_no_findings_until_it_is_changed() -> None:
    config = load_cluster(ON_GOOGLE)
    assert findings_in(config) == []
    kinds = {kind.name: kind for kind in node_types(config)}
    assert len({kind.machine for kind in kinds.values() if kind.is_spot}) == 3
    assert not kinds["head"].is_spot
    assert not kinds["on-demand-g2-standard-4"].is_spot
    config["available_node_types"]["head"]["node_config"]["scheduling"] = {"provisioningModel": "SPOT"}
    config["provider"]["availability_zone"] = "europe-west4-a"
    del config["available_node_types"]["head"]["node_config"]["serviceAccounts"]
    messages = " ".join(finding.message for finding in findings_in(config))
    for part in (
        "head is a spot node",
        "europe-west4-a is not in us-central1",
        "serviceAccounts is missing",
        "is on-demand, but",
    ):
        assert part in messages


def with_changes(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with other values at paths such as `provider security_group`, or without the value where it is DELETED."""
    config = dict(config)
    for path, value in changes.items():
        *parents, leaf = path.split()
        branch = config
        for parent in parents:
            branch[parent] = dict(branch[parent])  # several node types of the file share a mapping
            branch = branch[parent]
        branch.pop(leaf, None)
        if value is not DELETED:
            branch[leaf] = value
    return config


def rule(first: int, last: int, protocol: str, network: str) -> dict[str, Any]:
    """Return the change that opens ports of all nodes to a network."""
    opened = {"FromPort": first, "ToPort": last, "IpProtocol": protocol, "IpRanges": [{"CidrIp": network}]}
    return {"provider security_group": {"GroupName": "undula", "IpPermissions": [opened]}}


DELETED = object()
TYPES, HEAD_NODE, G5 = (
    "available_node_types",
    "available_node_types head node_config",
    "available_node_types spot-g5-xlarge",
)
FALLBACK = "available_node_types on-demand-g6-xlarge"
SPOT_MARKET = {"MarketType": "spot", "SpotOptions": {"MaxPrice": "1"}}
OTHER_MACHINES = ("spot-g5-xlarge", "spot-g6-2xlarge", "spot-g5-2xlarge")
STARTS = ["ray stop", "RAY_AUTH_MODE=token ray start --address=$RAY_HEAD_IP:6379"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({f"{HEAD_NODE} InstanceMarketOptions": SPOT_MARKET, f"{TYPES} head labels undula.io/market": "spot"},
         "available_node_types.head: the head is a spot node"),
        ({FALLBACK: DELETED}, "spot workers with 1 GPU have no on-demand type to fall back on"),
        ({f"{FALLBACK} max_workers": 0}, "spot workers with 1 GPU have no on-demand type to fall back on"),
        ({f"{TYPES} {name}": DELETED for name in OTHER_MACHINES}, "all spot workers are g6.xlarge"),
        ({f"{G5} node_config InstanceMarketOptions": {"MarketType": "spot"}}, "available_node_types.spot-g5-xlarge: no maximum price"),
        (rule(8265, 8265, "tcp", "0.0.0.0/0"), "ports 8265 to 8265 are open to everybody"),
        (rule(8265, 8265, "tcp", "0.0.0.0/1"), "ports 8265 to 8265 are open to everybody"),
        (rule(22, 22, "-1", "0.0.0.0/0"), "ports 0 to 65535 are open to everybody"),
        ({"head_start_ray_commands": ["ray start --head --dashboard-host=127.0.0.1"]}, "starts Ray without authentication"),
        ({"head_start_ray_commands": ["RAY_AUTH_MODE=token ray start --head --dashboard-host=0.0.0.0"]},
         "the dashboard listens on every interface"),
        ({"worker_start_ray_commands": DELETED, "worker_setup_commands": ["undula spot watch &"]}, "worker_start_ray_commands is missing"),
        ({"worker_start_ray_commands": STARTS}, "do not start the spot watcher"),
        ({"worker_start_ray_commands": STARTS, "worker_setup_commands": []}, "do not start the spot watcher"),
        ({"setup_commands": ["export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG"]}, "setup_commands contains a secret"),
        ({"docker": {"run_options": ["-e HF_TOKEN='hf_0123456789'"]}}, "docker contains a secret"),
        ({"provider aws_credentials": {"aws_access_key_id": "A"}}, "provider.aws_credentials: Ray copies this file"),
        ({TYPES: DELETED}, "available_node_types is missing"),
        ({f"{G5} labels undula.io/market": DELETED}, "spot-g5-xlarge: the label undula.io/market is missing"),
        ({f"{FALLBACK} labels undula.io/market": "spot"}, "the label undula.io/market is spot, but the nodes are on-demand"),
        ({f"{G5} labels undula.io/machine": DELETED}, "add labels: {undula.io/machine: g5.xlarge}"),
        ({f"{HEAD_NODE} IamInstanceProfile": {"Name": "undula-worker"}}, "IamInstanceProfile is the same as the head's"),
        ({f"{HEAD_NODE} IamInstanceProfile": DELETED}, "available_node_types.head: IamInstanceProfile is missing"),
        ({f"{HEAD_NODE} MetadataOptions": DELETED}, "set MetadataOptions: {HttpTokens: required}"),
        ({"provider availability_zone": "us-west-2a,us-east-1b"}, "us-east-1b is not in us-west-2"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_finding(config: dict[str, Any], changes: dict[str, Any], problem: str) -> None:
    (finding,) = findings_in(with_changes(config, changes))
    assert problem in finding.message


def test_workers_that_do_not_fit_are_reported_for_each_type(config: dict[str, Any]) -> None:
    findings = findings_in(config, WorkersSpec(gpus=1, cpus=6))
    assert len(findings) == 3
    assert all("needs 6 CPU" in finding.message for finding in findings)


def test_the_recipes_ask_for_a_gpu_by_default() -> None:
    for file in (OURS, ON_GOOGLE):
        assert findings_in(load_cluster(file), WorkersSpec(max=4)) == []
        idle = findings_in(load_cluster(file), WorkersSpec(max=4, gpus=0))
        names = {kind.name for kind in node_types(load_cluster(file)) if not kind.is_head}
        assert len(idle) == len(names)
        assert all(
            "1 of 1 GPUs would be idle, because workers.gpus is 0; set workers.gpus to auto" in finding.message
            for finding in idle
        )


def test_gpus_for_which_no_worker_fits_are_reported(config: dict[str, Any]) -> None:
    large = config["available_node_types"]["spot-g6-2xlarge"]
    large["resources"] = {"CPU": 8, "GPU": 4}
    (message,) = (finding.message for finding in findings_in(config, WorkersSpec(cpus=4)) if "idle" in finding.message)
    assert message == (
        "available_node_types.spot-g6-2xlarge: 2 of 4 GPUs would be idle, because only 2 of the job's workers fit on it; "
        "lower workers.cpus, or use another machine"
    )


@pytest.mark.parametrize(
    ("workers", "severity", "problem"),
    [
        (WorkersSpec(min=16, max=16, gpus=1, cpus=4), None, ""),
        (WorkersSpec(min=17, max=17, gpus=1, cpus=4), "error", "room for 16 workers, but the job needs at least 17"),
        (WorkersSpec(max=4, gpus=1, cpus=4, fleet=FleetSpec(deadline="6h")), None, ""),
        (WorkersSpec(max=5, gpus=1, cpus=4, fleet=FleetSpec(deadline="6h")), "warning", "room for 4 workers, but workers.fleet.deadline"),
        (WorkersSpec(max=9, gpus=1, cpus=4, fleet=FleetSpec(on_demand_floor=4)), None, ""),
        (WorkersSpec(max=9, gpus=1, cpus=4, fleet=FleetSpec(on_demand_floor=5)), "warning", "on_demand_floor needs 5"),
        (WorkersSpec(min=9, max=9, gpus=1, cpus=4, fleet=FleetSpec(spot_only=True)), None, ""),
    ],
)  # fmt: skip
def test_a_job_that_is_too_large_for_the_cluster_is_reported(
    config: dict[str, Any], workers: WorkersSpec, severity: str | None, problem: str
) -> None:
    findings = findings_in(config, workers)
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert all(problem in finding.message for finding in findings)


def test_the_limits_of_the_types_and_of_the_cluster_both_count(config: dict[str, Any]) -> None:
    for kind in config["available_node_types"].values():
        kind["max_workers"] = 1
    (finding,) = findings_in(config, WorkersSpec(min=6, max=6, gpus=1, cpus=4))
    assert "room for 5 workers" in finding.message
    config["max_workers"] = 0
    (finding,) = findings_in(config)
    assert "room for 0 workers" in finding.message


def test_unexpected_values_in_a_nodes_configuration_do_not_stop_the_check(config: dict[str, Any]) -> None:
    config["available_node_types"]["spot-g5-xlarge"]["node_config"] = {
        "InstanceMarketOptions": None, "MetadataOptions": None, "IamInstanceProfile": None, "scheduling": [],
    }  # fmt: skip
    rules = [{"IpProtocol": "tcp", "IpRanges": None, "Ipv6Ranges": [{"CidrIpv6": "elsewhere"}, None]}, None]
    config["provider"]["security_group"]["IpPermissions"] = rules
    config["provider"]["availability_zone"] = None
    assert any("the nodes are on-demand" in finding.message for finding in findings_in(config))


def test_commands_that_read_a_secret_on_the_node_contain_none(config: dict[str, Any]) -> None:
    config["setup_commands"] += [
        'TOKEN=$(curl -s -X PUT http://169.254.169.254/latest/api/token); export HF_TOKEN="$(cat ~/hf)"',
        "export RAY_AUTH_TOKEN_PATH=/home/ubuntu/.ray/auth_token HF_TOKEN=`cat /run/hf-token`",
    ]
    assert findings_in(config) == []


def test_a_bucket_in_another_region_is_an_error_and_one_in_an_unknown_region_a_warning(config: dict[str, Any]) -> None:
    far, unknown = findings_in(config, WORKERS, "near", "far", "secret")
    assert (far.severity, unknown.severity) == ("error", "warning")
    assert "s3://far is in eu-west-1 but the cluster is in us-west-2" in far.message
    assert "access denied" in unknown.message


def test_a_minimal_file_is_checked_with_rays_defaults(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster_name: x\nprovider: {type: aws, region: us-west-2}\n")
    messages = [finding.message for finding in findings_in(load_cluster(path))]
    assert len(messages) == 3
    assert messages[0].startswith("available_node_types is missing")
    assert messages[1].startswith("head_start_ray_commands is missing")


def test_a_file_that_ray_would_reject_is_refused_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster_name: x\nprovider: {type: aws}\nauth: {}\nmax_wrokers: 3\n")
    with pytest.raises(SpecError, match="max_wrokers"):
        load_cluster(path)
    path.write_text("a: [")
    with pytest.raises(SpecError, match="cannot be read"):
        load_cluster(path)
