"""Tests of docs/cluster-gcp.yaml with Ray's preparation, bootstrap and provider for Google Cloud, down to the bodies of the requests.

The project does not depend on Google's client library, and tests cannot reach its servers. A stand-in for both returns only the fields that
Ray reads, and records the requests. Whether Google accepts them is not tested.
"""

import copy
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

CONFIG = Path(__file__).parents[2] / "docs" / "cluster-gcp.yaml"
MINE = "@your-project.iam.gserviceaccount.com"


class HttpError(Exception):
    """Stand-in for googleapiclient.errors.HttpError."""


class Google:
    """Stand-in for any resource of any service. `compute.instances().insert(body=...).execute()` records the call and responds."""

    def __init__(self, calls: dict[str, list[dict[str, Any]]], path: str):
        self._calls, self._path = calls, path
        self._http = type("Http", (), {"credentials": None})()

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> "Google":
            member = Google(self._calls, f"{self._path}.{name}")
            self._calls[member._path].append(copy.deepcopy(arguments))
            return member

        return call

    def execute(self, http: object = None) -> dict[str, Any]:
        account = {"email": f"ray-autoscaler-sa-v1{MINE}", "projectId": "your-project"}
        ready = {"name": "operation", "status": "DONE", "done": True}
        return {
            "cloudresourcemanager.projects.get": {"lifecycleState": "ACTIVE", "projectId": "your-project"},
            "cloudresourcemanager.projects.getIamPolicy": {"bindings": []},
            "iam.projects.serviceAccounts.get": account,
            "compute.projects.get": {"commonInstanceMetadata": {"items": []}, "name": "your-project"},
            "compute.subnetworks.list": {"items": [{"selfLink": "projects/your-project/subnet"}]},
        }.get(self._path, ready)


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Recorded calls by name."""
    calls: dict[str, list[dict[str, Any]]] = defaultdict(list)
    modules = {
        "googleapiclient": {},
        "googleapiclient.discovery": {"build": lambda service, *_, **__: Google(calls, service), "Resource": Google},
        "googleapiclient.errors": {"HttpError": HttpError},
        "googleapiclient.http": {"HttpRequest": object},
        "google_auth_httplib2": {"AuthorizedHttp": lambda *_, **__: None},
        "httplib2": {"Http": object},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield calls
    for name in [name for name in sys.modules if name.startswith("ray.autoscaler._private.gcp")]:
        del sys.modules[name]  # they refer to the stand-in


def bootstrapped() -> dict[str, Any]:
    from ray.autoscaler._private.gcp.config import bootstrap_gcp
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load(CONFIG.read_text()))
    validate_config(config)
    return bootstrap_gcp(config)  # type: ignore[no-any-return]


def launched(google: dict[str, list[dict[str, Any]]], config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the body of the request for a node of a type, as the autoscaler on the head sends it."""
    from ray.autoscaler._private.gcp.node_provider import GCPNodeProvider

    provider = GCPNodeProvider(config["provider"], config["cluster_name"])
    tags = {"ray-node-name": "ray-undula-worker", "ray-user-node-type": name, "ray-node-type": "worker"}
    provider.create_node(config["available_node_types"][name]["node_config"], tags, 1)
    return google["compute.instances.insert"][-1]["body"]  # type: ignore[no-any-return]


def test_workers_are_launched_as_spot_or_on_demand_with_the_permissions_of_workers(google: Any) -> None:
    config = bootstrapped()
    markets = [node_type["labels"]["undula.io/market"] for node_type in config["available_node_types"].values()]
    assert {"spot", "on-demand"} <= set(markets)
    for name, node_type in config["available_node_types"].items():
        body = launched(google, config, name)
        assert body["machineType"] == f"zones/us-central1-a/machineTypes/{node_type['labels']['undula.io/machine']}"
        (account,) = body["serviceAccounts"]
        if name == "head":
            assert account == {"email": f"undula-head{MINE}", "scopes": ["https://www.googleapis.com/auth/compute"]}
        else:
            assert account["email"] == f"undula-worker{MINE}"
            assert account["scopes"] == ["https://www.googleapis.com/auth/devstorage.read_write"]
            assert body["scheduling"]["onHostMaintenance"] == "TERMINATE"
        is_spot = body.get("scheduling", {}).get("provisioningModel") == "SPOT"
        assert is_spot == (node_type["labels"]["undula.io/market"] == "spot")
        assert is_spot == (body.get("scheduling", {}).get("instanceTerminationAction") == "DELETE")
        assert body["labels"]["ray-cluster-name"] == "undula"
        assert body["networkInterfaces"][0]["subnetwork"] == "projects/your-project/subnet"


def test_the_head_keeps_the_configured_service_account(google: Any) -> None:
    """Ray still grants broad permissions to the account that it creates, as docs/spot.md explains."""
    config = bootstrapped()
    head = {
        **config["head_node"],
        **config["available_node_types"]["head"]["node_config"],
    }  # as `ray up` combines them
    assert head["serviceAccounts"][0]["email"] == f"undula-head{MINE}"
    (bound,) = google["cloudresourcemanager.projects.setIamPolicy"]
    assert "roles/compute.admin" in json.dumps(bound)


def test_workers_are_set_up_as_on_aws_except_for_the_store(google: Any) -> None:
    ours, aws = yaml.safe_load(CONFIG.read_text()), yaml.safe_load((CONFIG.parents[1] / "cluster.yaml").read_text())
    for key in (
        "worker_setup_commands",
        "head_start_ray_commands",
        "worker_start_ray_commands",
        "rsync_exclude",
        "auth",
    ):
        assert ours[key] == aws[key]
    assert ours["setup_commands"][:-1] == aws["setup_commands"][:-1]
    assert aws["file_mounts"].items() <= ours["file_mounts"].items()
    config = bootstrapped()
    assert not [command for command in config["head_setup_commands"] if "==1.7.8" in command]
