"""What `undula cluster check` finds; our own cluster.yaml has none of it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from undula.cluster.check import Finding, check_cluster, load_cluster, node_types
from undula.elastic.spec import WorkersSpec
from undula.errors import SpecError

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


def test_ours_has_nothing_to_mend(config: dict[str, Any]) -> None:
    assert found(config, WORKERS, "near") == []
    kinds = node_types(config)
    assert len({each.machine for each in kinds if each.is_spot}) >= 4
    assert [each.is_spot for each in kinds if each.is_head] == [False]


def test_ours_for_google_has_nothing_to_mend() -> None:
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
        "no serviceAccounts",
        "is on-demand, and",
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
    ("change", "sentence"),
    [
        (head_on_spot, "available_node_types.head: the head is a spot node"),
        (no_fallback, "spot workers with 1 GPU have no on-demand type to fall back on"),
        (one_machine, "all spot workers are g6.xlarge, which go together"),
        (no_price, "available_node_types.spot-g5-xlarge: no maximum price"),
        (open_ports, "ports 8265 to 8265 are open to everybody"),
        (no_token, "starts Ray without its token"),
        (dashboard_everywhere, "the dashboard listens on every interface"),
        (no_watcher, "no spot watcher is started"),
        (no_market, "spot-g5-xlarge: no label undula.io/market"),
        (wrong_market, "the label undula.io/market is spot, and the nodes are on-demand"),
        (no_machine, "give labels: {undula.io/machine: g5.xlarge}"),
        (one_profile, "IamInstanceProfile is the head's, and with it every job may launch"),
        (no_profile, "available_node_types.head: no IamInstanceProfile"),
        (open_metadata, "give MetadataOptions: {HttpTokens: required}"),
        (a_secret, "provider.aws_credentials: Ray copies this file"),
        (other_zone, "us-east-1b is not in us-west-2"),
    ],
)
def test_each_mistake_is_one_finding(
    config: dict[str, Any], change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    change(config)
    (finding,) = found(config)
    assert sentence in finding.message


def test_workers_that_fit_nowhere_are_named_for_each_type(config: dict[str, Any]) -> None:
    findings = found(config, WorkersSpec(gpus=1, cpus=6))
    assert len(findings) == 3
    assert all("it needs 6 CPU" in finding.message for finding in findings)


def test_a_bucket_elsewhere_is_an_error_and_one_that_does_not_say_a_warning(config: dict[str, Any]) -> None:
    far, unknown = found(config, WORKERS, "near", "far", "secret")
    assert (far.severity, unknown.severity) == ("error", "warning")
    assert "s3://far is in eu-west-1 and the cluster in us-west-2" in far.message
    assert "access denied" in unknown.message


def test_what_ray_would_not_take_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster_name: x\nprovider: {type: aws}\nauth: {}\nmax_wrokers: 3\n")
    with pytest.raises(SpecError, match="max_wrokers"):
        load_cluster(path)
    path.write_text("a: [")
    with pytest.raises(SpecError, match="cannot be read"):
        load_cluster(path)
