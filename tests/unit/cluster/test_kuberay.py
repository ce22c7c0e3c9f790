"""Tests of docs/kuberay-rayjob.yaml against the fields of KubeRay, and as Ray reads them.

FIELDS has the fields of KubeRay 1.7.0 for the objects in the manifest (github.com/ray-project/kuberay, tag v1.7.0,
ray-operator/config/crd/bases/ray.io_rayjobs.yaml, version v1), so that the tests find a wrong key or type without a cluster. For pods,
which Kubernetes defines, it has only the fields in use. The manifest was validated against the whole openAPIV3Schema of that file, with
unknown keys refused. KubeRay supports group labels since 1.5, `authOptions.secretName` since 1.6, and the priority of a group since 1.7.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from undula.cli.spot import leave

ROOT = Path(__file__).parents[3]
TEXTS, AMOUNTS = {str: str}, {str: str}
CONTAINER = {
    "name!": str, "image": str, "env": [{"name!": str, "value": str}], "ports": [{"containerPort!": int, "name": str}],
    "lifecycle": {"preStop": {"exec": {"command": [str]}}}, "resources": {"requests": AMOUNTS, "limits": AMOUNTS},
}  # fmt: skip
POD = {
    "serviceAccountName": str, "automountServiceAccountToken": bool, "nodeSelector": TEXTS, "containers!": [CONTAINER],
    "tolerations": [{"key": str, "operator": str, "value": str, "effect": str}], "terminationGracePeriodSeconds": int,
}  # fmt: skip
TEMPLATE = {"metadata": dict, "spec": POD}
HEAD = {
    "template!": TEMPLATE, "rayStartParams": TEXTS, "labels": TEXTS, "resources": TEXTS, "serviceType": str, "headService": dict,
    "enableIngress": bool, "ingressOptions": dict,
}  # fmt: skip
GROUP = {
    "groupName!": str, "template!": TEMPLATE, "minReplicas!": int, "maxReplicas!": int, "replicas": int, "rayStartParams": TEXTS,
    "labels": TEXTS, "resources": TEXTS, "priority": int, "idleTimeoutSeconds": int, "numOfHosts": int, "suspend": bool,
    "scaleStrategy": dict,
}  # fmt: skip
AUTOSCALER = {
    "version": str, "upscalingMode": str, "idleTimeoutSeconds": int, "image": str, "imagePullPolicy": str, "resources": dict,
    "securityContext": dict, "env": list, "envFrom": list, "volumeMounts": list, "command": list, "args": list,
}  # fmt: skip
CLUSTER = {
    "headGroupSpec!": HEAD, "workerGroupSpecs": [GROUP], "autoscalerOptions": AUTOSCALER, "rayVersion": str,
    "enableInTreeAutoscaling": bool,
    "authOptions": {"mode": str, "secretName": str, "enableK8sTokenAuth": bool}, "suspend": bool, "managedBy": str, "tlsOptions": dict,
    "networkPolicy": dict, "upgradeStrategy": dict, "headServiceAnnotations": TEXTS, "gcsFaultToleranceOptions": dict,
    "historyServerOptions": dict,
}  # fmt: skip
JOB = {
    "entrypoint": str, "rayClusterSpec": CLUSTER, "shutdownAfterJobFinishes": bool, "ttlSecondsAfterFinished": int, "backoffLimit": int,
    "activeDeadlineSeconds": int, "preRunningDeadlineSeconds": int, "submissionMode": str, "submitterPodTemplate": dict,
    "submitterConfig": dict, "metadata": TEXTS, "clusterSelector": TEXTS, "runtimeEnvYAML": str, "jobId": str, "entrypointNumCpus": int,
    "entrypointNumGpus": int, "entrypointResources": str, "suspend": bool, "managedBy": str, "deletionStrategy": dict,
}  # fmt: skip
FIELDS = {"apiVersion": str, "kind": str, "metadata": {"name!": str}, "spec": JOB}
"""Fields by object: `name!` is required, the one element of a list is the schema of all elements, and {str: str} has any names."""


@pytest.fixture
def manifest() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docs" / "kuberay-rayjob.yaml").read_text())  # type: ignore[no-any-return]


def wrong(value: Any, form: Any, path: str = "") -> Iterator[str]:
    if isinstance(form, list):
        for place, item in enumerate(value):
            yield from wrong(item, form[0], f"{path}[{place}]")
    elif isinstance(form, Mapping) and str not in form:
        fields = {name.removesuffix("!"): field for name, field in form.items()}
        for name in form:
            if name.endswith("!") and name.removesuffix("!") not in value:
                yield f"{path}.{name.removesuffix('!')} is missing"
        for name, item in value.items():
            if name not in fields:
                yield f"{path}.{name} is unknown"
            else:
                yield from wrong(item, fields[name], f"{path}.{name}")
    elif isinstance(form, Mapping):
        yield from (f"{path}.{name} is not text" for name, item in value.items() if not isinstance(item, str))
    elif type(value) is not form:
        yield f"{path} is {type(value).__name__}"


def test_every_field_exists_in_kuberay(manifest: dict[str, Any]) -> None:
    assert list(wrong(manifest, FIELDS)) == []
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    group = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    group["maxReplica"] = group.pop("maxReplicas")
    group["rayStartParams"]["num-cpus"] = 4
    problems = list(wrong(manifest, FIELDS))
    place = ".spec.rayClusterSpec.workerGroupSpecs[0]"
    assert set(problems) == {
        f"{place}.maxReplicas is missing",
        f"{place}.maxReplica is unknown",
        f"{place}.rayStartParams.num-cpus is not text",
    }


def test_rays_autoscaler_reads_the_groups_with_their_labels_and_priorities(manifest: dict[str, Any]) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    cluster = {"metadata": {"name": "c", "namespace": "n"}, "spec": manifest["spec"]["rayClusterSpec"]}
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    head = types.pop("headgroup")
    assert (head["resources"]["CPU"], head["max_workers"]) == (0, 0)
    markets = {name: node_type["labels"]["undula.io/market"] for name, node_type in types.items()}
    assert markets == {"spot-g6-xlarge": "spot", "spot-g5-xlarge": "spot", "on-demand-g6-xlarge": "on-demand"}
    for name, node_type in types.items():
        assert node_type["resources"]["GPU"] == 1
        assert node_type["min_workers"] == 0 < node_type["max_workers"]
        assert name.endswith(node_type["labels"]["undula.io/machine"].replace(".", "-"))
        assert node_type["labels"]["undula.io/type"] == name
    by_priority = sorted(types, key=lambda name: types[name]["priority"])
    assert by_priority[0] == "on-demand-g6-xlarge"


def worker_groups(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    groups = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert len(groups) == 3
    return groups  # type: ignore[no-any-return]


def test_pods_are_scheduled_on_the_nodes_of_their_labels(manifest: dict[str, Any]) -> None:
    for group in worker_groups(manifest):
        node = group["template"]["spec"]["nodeSelector"]
        assert node["karpenter.sh/capacity-type"] == group["labels"]["undula.io/market"]
        assert node["node.kubernetes.io/instance-type"] == group["labels"]["undula.io/machine"]


def test_the_end_of_a_pod_drains_its_node_within_the_grace_period(manifest: dict[str, Any]) -> None:
    for group in worker_groups(manifest):
        pod = group["template"]["spec"]
        program, *arguments = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert [program, *arguments[:2]] == ["undula", "spot", "leave"]
        notice_s = leave.make_context("leave", arguments[2:]).params["notice"]
        assert 0 < notice_s < pod["terminationGracePeriodSeconds"] <= 120


def test_the_token_comes_from_a_secret_and_workers_have_no_permissions_in_kubernetes(manifest: dict[str, Any]) -> None:
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "undula-token"}
    head = cluster["headGroupSpec"]["template"]["spec"]["serviceAccountName"]
    for group in worker_groups(manifest):
        pod = group["template"]["spec"]
        assert pod["serviceAccountName"] != head
        assert pod["automountServiceAccountToken"] is False


def test_the_job_is_submitted_again_if_its_head_is_lost(manifest: dict[str, Any]) -> None:
    assert manifest["spec"]["backoffLimit"] >= 1
    assert "runs=s3://" in manifest["spec"]["entrypoint"], "the run must outlive the head"


def test_the_manifest_runs_a_job_of_this_repository(manifest: dict[str, Any]) -> None:
    from undula.config.job import load_spec

    _, script, *overrides = manifest["spec"]["entrypoint"].split()
    path = ROOT / script.removeprefix("/home/ray/undula/")
    assert path.exists()
    spec = load_spec(path.with_suffix(".yaml"), overrides).spec
    assert spec.run_url == "s3://YOUR-BUCKET/runs/language-model"
    assert spec.workers.gpus == "auto"
