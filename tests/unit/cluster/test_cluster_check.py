"""Tests of `undula cluster check`: it finds each mistake, and none in the configurations that ship."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from undula.cluster.check import check_cluster, load_cluster
from undula.cluster.node_types import Finding, node_types
from undula.elastic.pure.spec import WorkersSpec
from undula.errors import SpecError
from undula.plan.fleet import FleetSpec

ROOT = Path(__file__).parents[3]
OURS = ROOT / "cluster.yaml"
ON_GOOGLE = ROOT / "docs" / "cluster-gcp.yaml"
WORKERS = WorkersSpec(gpus=1, cpus=4)


@pytest.fixture
def config() -> dict[str, Any]:
    return copy.deepcopy(load_cluster(OURS))


def region_of(bucket: str) -> str:
    if bucket == "secret":
        raise SpecError("access denied")
    return {"near": "us-west-2", "far": "eu-west-1"}[bucket]


def found(config: dict[str, Any], workers: WorkersSpec = WORKERS, *buckets: str) -> list[Finding]:
    return check_cluster(config, workers, buckets, region_of)


def test_cluster_yaml_has_no_findings(config: dict[str, Any]) -> None:
    assert found(config, WORKERS, "near") == []
    kinds = node_types(config)
    assert len({each.machine for each in kinds if each.is_spot}) >= 4
    assert [each.is_spot for each in kinds if each.is_head] == [False]


def test_the_configuration_for_google_cloud_has_no_findings_until_it_is_changed() -> None:
    config = load_cluster(ON_GOOGLE)
    assert found(config) == []
    kinds = {each.name: each for each in node_types(config)}
    assert len({each.machine for each in kinds.values() if each.is_spot}) == 3
    assert not kinds["head"].is_spot
    assert not kinds["on-demand-g2-standard-4"].is_spot
    config["available_node_types"]["head"]["node_config"]["scheduling"] = {"provisioningModel": "SPOT"}
    config["provider"]["availability_zone"] = "europe-west4-a"
    del config["available_node_types"]["head"]["node_config"]["serviceAccounts"]
    messages = " ".join(each.message for each in found(config))
    for part in (
        "head is a spot node",
        "europe-west4-a is not in us-central1",
        "serviceAccounts is missing",
        "is on-demand, but",
    ):
        assert part in messages


def head_on_spot(config: dict[str, Any]) -> None:
    config["available_node_types"]["head"]["node_config"] = {
        **config["available_node_types"]["head"]["node_config"],
        "InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": {"MaxPrice": "1"}},
    }
    config["available_node_types"]["head"]["labels"]["undula.io/market"] = "spot"


def no_fallback(config: dict[str, Any]) -> None:
    del config["available_node_types"]["on-demand-g6-xlarge"]


def one_machine(config: dict[str, Any]) -> None:
    for name in [
        name for name in config["available_node_types"] if name.startswith("spot-") and "g6-xlarge" not in name
    ]:
        del config["available_node_types"][name]


def no_price(config: dict[str, Any]) -> None:
    kind = config["available_node_types"]["spot-g5-xlarge"]
    kind["node_config"] = {**kind["node_config"], "InstanceMarketOptions": {"MarketType": "spot"}}


def open_ports(config: dict[str, Any]) -> None:
    rule = {"FromPort": 8265, "ToPort": 8265, "IpProtocol": "tcp", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    config["provider"]["security_group"]["IpPermissions"] = [rule]


def no_token(config: dict[str, Any]) -> None:
    config["head_start_ray_commands"] = ["ray start --head --dashboard-host=127.0.0.1"]


def dashboard_everywhere(config: dict[str, Any]) -> None:
    config["head_start_ray_commands"] = ["RAY_AUTH_MODE=token ray start --head --dashboard-host=0.0.0.0"]


def no_start(config: dict[str, Any]) -> None:
    del config["worker_start_ray_commands"]
    config["worker_setup_commands"] = ["undula spot watch &"]


def watcher_not_started(config: dict[str, Any]) -> None:
    config["worker_start_ray_commands"] = config["worker_start_ray_commands"][:2]


def all_ports(config: dict[str, Any]) -> None:
    rule = {"FromPort": 22, "ToPort": 22, "IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    config["provider"]["security_group"]["IpPermissions"] = [rule]


def half_of_the_world(config: dict[str, Any]) -> None:
    rule = {"FromPort": 8265, "ToPort": 8265, "IpProtocol": "tcp", "IpRanges": [{"CidrIp": "0.0.0.0/1"}]}
    config["provider"]["security_group"]["IpPermissions"] = [rule]


def key_in_a_command(config: dict[str, Any]) -> None:
    config["setup_commands"] = [*config["setup_commands"], "export AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG"]


def key_in_a_mapping(config: dict[str, Any]) -> None:
    config["docker"] = {"run_options": ["-e HF_TOKEN='hf_0123456789'"]}


def fallback_of_no_nodes(config: dict[str, Any]) -> None:
    config["available_node_types"]["on-demand-g6-xlarge"]["max_workers"] = 0


def no_types(config: dict[str, Any]) -> None:
    del config["available_node_types"]


def no_watcher(config: dict[str, Any]) -> None:
    config["worker_start_ray_commands"] = config["worker_start_ray_commands"][:2]
    config["worker_setup_commands"] = []


def no_market(config: dict[str, Any]) -> None:
    del config["available_node_types"]["spot-g5-xlarge"]["labels"]["undula.io/market"]


def wrong_market(config: dict[str, Any]) -> None:
    config["available_node_types"]["on-demand-g6-xlarge"]["labels"]["undula.io/market"] = "spot"


def no_machine(config: dict[str, Any]) -> None:
    del config["available_node_types"]["spot-g5-xlarge"]["labels"]["undula.io/machine"]


def one_profile(config: dict[str, Any]) -> None:
    head = config["available_node_types"]["head"]["node_config"]
    head["IamInstanceProfile"] = {"Name": "undula-worker"}


def no_profile(config: dict[str, Any]) -> None:
    del config["available_node_types"]["head"]["node_config"]["IamInstanceProfile"]


def open_metadata(config: dict[str, Any]) -> None:
    del config["available_node_types"]["head"]["node_config"]["MetadataOptions"]


def a_secret(config: dict[str, Any]) -> None:
    config["provider"]["aws_credentials"] = {"aws_access_key_id": "A"}


def other_zone(config: dict[str, Any]) -> None:
    config["provider"]["availability_zone"] = "us-west-2a,us-east-1b"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (head_on_spot, "available_node_types.head: the head is a spot node"),
        (no_fallback, "spot workers with 1 GPU have no on-demand type to fall back on"),
        (one_machine, "all spot workers are g6.xlarge"),
        (no_price, "available_node_types.spot-g5-xlarge: no maximum price"),
        (open_ports, "ports 8265 to 8265 are open to everybody"),
        (no_token, "starts Ray without authentication"),
        (no_start, "worker_start_ray_commands is missing"),
        (watcher_not_started, "do not start the spot watcher"),
        (all_ports, "ports 0 to 65535 are open to everybody"),
        (half_of_the_world, "ports 8265 to 8265 are open to everybody"),
        (key_in_a_command, "setup_commands contains a secret"),
        (key_in_a_mapping, "docker contains a secret"),
        (fallback_of_no_nodes, "spot workers with 1 GPU have no on-demand type to fall back on"),
        (no_types, "available_node_types is missing"),
        (dashboard_everywhere, "the dashboard listens on every interface"),
        (no_watcher, "do not start the spot watcher"),
        (no_market, "spot-g5-xlarge: the label undula.io/market is missing"),
        (wrong_market, "the label undula.io/market is spot, but the nodes are on-demand"),
        (no_machine, "add labels: {undula.io/machine: g5.xlarge}"),
        (one_profile, "IamInstanceProfile is the same as the head's"),
        (no_profile, "available_node_types.head: IamInstanceProfile is missing"),
        (open_metadata, "set MetadataOptions: {HttpTokens: required}"),
        (a_secret, "provider.aws_credentials: Ray copies this file"),
        (other_zone, "us-east-1b is not in us-west-2"),
    ],
)
def test_each_mistake_is_one_finding(
    config: dict[str, Any], change: Callable[[dict[str, Any]], None], problem: str
) -> None:
    change(config)
    (finding,) = found(config)
    assert problem in finding.message


def test_workers_that_do_not_fit_are_reported_for_each_type(config: dict[str, Any]) -> None:
    findings = found(config, WorkersSpec(gpus=1, cpus=6))
    assert len(findings) == 3
    assert all("needs 6 CPU" in finding.message for finding in findings)


def test_the_recipes_ask_for_a_gpu_by_default() -> None:
    for file in (OURS, ON_GOOGLE):
        assert found(load_cluster(file), WorkersSpec(max=4)) == []
        idle = found(load_cluster(file), WorkersSpec(max=4, gpus=0))
        names = {each.name for each in node_types(load_cluster(file)) if not each.is_head}
        assert len(idle) == len(names)
        assert all(
            "1 of 1 GPUs would be idle, because workers.gpus is 0; set workers.gpus to auto" in each.message
            for each in idle
        )


def test_gpus_for_which_no_worker_fits_are_reported(config: dict[str, Any]) -> None:
    large = config["available_node_types"]["spot-g6-2xlarge"]
    large["resources"] = {"CPU": 8, "GPU": 4}
    (message,) = (each.message for each in found(config, WorkersSpec(cpus=4)) if "idle" in each.message)
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
    findings = found(config, workers)
    assert [each.severity for each in findings] == ([severity] if severity else [])
    assert all(problem in each.message for each in findings)


def test_the_limits_of_the_types_and_of_the_cluster_both_count(config: dict[str, Any]) -> None:
    for kind in config["available_node_types"].values():
        kind["max_workers"] = 1
    (finding,) = found(config, WorkersSpec(min=6, max=6, gpus=1, cpus=4))
    assert "room for 5 workers" in finding.message
    config["max_workers"] = 0
    (finding,) = found(config)
    assert "room for 0 workers" in finding.message


def test_unexpected_values_in_a_nodes_configuration_do_not_stop_the_check(config: dict[str, Any]) -> None:
    config["available_node_types"]["spot-g5-xlarge"]["node_config"] = {
        "InstanceMarketOptions": None, "MetadataOptions": None, "IamInstanceProfile": None, "scheduling": [],
    }  # fmt: skip
    rules = [{"IpProtocol": "tcp", "IpRanges": None, "Ipv6Ranges": [{"CidrIpv6": "elsewhere"}, None]}, None]
    config["provider"]["security_group"]["IpPermissions"] = rules
    config["provider"]["availability_zone"] = None
    assert any("the nodes are on-demand" in each.message for each in found(config))


def test_commands_that_read_a_secret_on_the_node_contain_none(config: dict[str, Any]) -> None:
    config["setup_commands"] += [
        'TOKEN=$(curl -s -X PUT http://169.254.169.254/latest/api/token); export HF_TOKEN="$(cat ~/hf)"',
        "export RAY_AUTH_TOKEN_PATH=/home/ubuntu/.ray/auth_token HF_TOKEN=`cat /run/hf-token`",
    ]
    assert found(config) == []


def test_a_bucket_in_another_region_is_an_error_and_one_in_an_unknown_region_a_warning(config: dict[str, Any]) -> None:
    far, unknown = found(config, WORKERS, "near", "far", "secret")
    assert (far.severity, unknown.severity) == ("error", "warning")
    assert "s3://far is in eu-west-1 but the cluster is in us-west-2" in far.message
    assert "access denied" in unknown.message


def test_a_minimal_file_is_checked_with_rays_defaults(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster_name: x\nprovider: {type: aws, region: us-west-2}\n")
    messages = [each.message for each in found(load_cluster(path))]
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
