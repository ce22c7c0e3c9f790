"""Tests of the GPUs that workers get and see. They need no GPU: what torch and Ray report is simulated where a test needs one."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
import yaml
from ray.exceptions import RayTaskError
from ray.train import WorkerGroupError
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.exceptions import ControllerError

from undula.data.spec import DataSpec, ValidationSpec
from undula.elastic import worker
from undula.elastic.ray import actor, backend, cluster_gpus, gpus
from undula.elastic.ray.actor import ElasticWorker
from undula.elastic.ray.backend import InProcessGroup, Rendezvous
from undula.elastic.ray.cluster_gpus import autoscaling_config, offers_gpus, starts_gpus
from undula.elastic.ray.environment import SURVIVE_NCCL, variables_of_worker
from undula.elastic.ray.failures import refusal_of
from undula.elastic.ray.gpus import hide_unreserved_gpus, refuse_unseen_gpus
from undula.elastic.ray.pool import WorkerPool
from undula.elastic.ray.pooled_worker import PooledWorker
from undula.elastic.ray.scaling import PoolPolicy
from undula.elastic.worker import prepare_worker
from undula.errors import CheckpointError, ClusterError, StorageError
from undula.parallel.spec import GradientSpec
from undula.plan.plan import PlanSpec
from undula.plan.schedule import ScheduleSpec
from undula.recovery.worker_state import WorkerState
from undula.state.spec import CheckpointSpec
from undula.train.job import Job

ROOT = Path(__file__).parents[3]
HEADER = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d" / "ProcessGroupNCCL.hpp"
Patch = pytest.MonkeyPatch


def alone() -> Any:
    return SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)


def test_a_worker_on_the_cpu_joins_its_group_where_torch_sees_a_gpu(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend.ray.train.torch, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(backend.ray.train, "get_context", alone)
    wake = SimpleNamespace(remote=lambda: None)
    controller = SimpleNamespace(wake=wake)
    monkeypatch.setattr(backend, "get_train_context", lambda: SimpleNamespace(controller_actor=controller))
    monkeypatch.setattr(backend, "_rendezvous", Rendezvous("127.0.0.1", 0, "gloo", 30.0))
    with InProcessGroup():
        assert dist.get_world_size() == 1


def test_a_worker_with_a_gpu_makes_it_its_device_before_its_group_exists(monkeypatch: Patch) -> None:
    order: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", order.append)
    monkeypatch.setattr(backend.ray.train.torch, "get_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(backend.ray.train, "get_context", alone)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: order.append(name))
    monkeypatch.setattr(backend, "_rendezvous", Rendezvous("127.0.0.1", 0, "nccl", 30.0))
    InProcessGroup().__enter__()
    assert order == [torch.device("cuda", 0), "nccl"]


def test_a_worker_sees_a_gpu_only_if_it_has_reserved_one() -> None:
    assert variables_of_worker({"CPU": 1.0})["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in variables_of_worker({"CPU": 1.0, "GPU": 1.0})  # Ray sets it


def test_a_worker_with_a_gpu_survives_the_loss_of_another_rank() -> None:
    variables = variables_of_worker({"GPU": 1.0})
    assert variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert variables["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    text = HEADER.read_text()
    assert all(f'"{name}"' in text for name in SURVIVE_NCCL), "torch no longer reads one of these"


def test_a_process_without_a_reserved_gpu_hides_the_gpus_of_its_node(monkeypatch: Patch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(gpus.ray, "get_gpu_ids", lambda: ["1"])
    hide_unreserved_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.setattr(gpus.ray, "get_gpu_ids", list)
    hide_unreserved_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("reserved", "seen", "cuda", "message"),
    [
        (0, 0, None, None),
        (1, 1, "13.0", None),
        (1, 0, None, r"reserved 1 GPU, but torch .* sees 0; install a build of torch with CUDA on the node, or set workers\.gpus=0"),
        (2, 1, "13.0", r"reserved 2 GPUs, but torch .* sees 1; check nvidia-smi and the driver on the node"),
    ],
)  # fmt: skip
def test_reserved_gpus_that_torch_does_not_see_are_refused(
    monkeypatch: Patch, reserved: int, seen: int, cuda: str | None, message: str | None
) -> None:
    monkeypatch.setattr(gpus.ray, "get_gpu_ids", lambda: [str(number) for number in range(reserved)])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ClusterError, match=message) if message else nullcontext():
        refuse_unseen_gpus()


@pytest.fixture
def prepared(monkeypatch: Patch) -> Callable[[Callable[[], None] | None], list[Any]]:
    """Return a function that prepares a worker and returns what torch computes with at its first computation."""
    seen: list[Any] = []
    monkeypatch.setattr(actor, "refuse_unseen_gpus", lambda: None)
    monkeypatch.setattr(actor, "reserved_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(actor, "name_of_node", lambda: "10.0.0.2 (bbbbbbbb)")
    monkeypatch.setattr(actor, "warm_up", lambda device: seen.append(how_torch_computes()))
    monkeypatch.setattr(actor.gc, "freeze", lambda: None)

    def prepare(own: Callable[[], None] | None) -> list[Any]:
        made: Any = ElasticWorker.__new__(ElasticWorker)
        made._state = WorkerState()
        made.get_metadata = lambda: ActorMetadata("host", "node", "10.0.0.2", 1, {})
        made.prepare(SimpleNamespace(get=lambda: None), own, 0, "home")
        return seen

    return prepare


def how_torch_computes() -> tuple[str | None, bool]:
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.are_deterministic_algorithms_enabled()


def job(deterministic: bool) -> Job:
    return Job(
        name="job",
        run_url="/nowhere",
        data=DataSpec(train="/nowhere"),
        plan=PlanSpec(),
        schedule=ScheduleSpec(),
        gradient=GradientSpec(),
        validation=ValidationSpec(),
        checkpoint=CheckpointSpec(),
        deterministic=deterministic,
        config=None,
    )


@pytest.mark.parametrize("deterministic", [True, False])
def test_cublas_is_deterministic_before_a_worker_multiplies_for_the_first_time(
    monkeypatch: Patch, prepared: Any, deterministic: bool
) -> None:
    """torch reads the variable once, at the first product, and would refuse every later product in deterministic mode."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(worker, "open_data", lambda job: None)
    threads = torch.get_num_threads()
    try:
        (computed,) = prepared(partial(prepare_worker, job(deterministic), lambda message: None))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert computed == ((":4096:8", True) if deterministic else (None, False))


def test_a_worker_that_cannot_train_names_its_node(monkeypatch: Patch, prepared: Any) -> None:
    def refuse() -> None:
        raise ClusterError("torch sees no GPU; install another")

    monkeypatch.setattr(actor, "refuse_unseen_gpus", refuse)
    with pytest.raises(
        ClusterError, match=r"no worker can train on node 10\.0\.0\.2 \(bbbbbbbb\): torch sees no GPU; install"
    ):
        prepared(None)


def raised(error: Exception) -> Callable[..., Any]:
    def get(_answer: Any) -> Any:
        raise RayTaskError("prepare", "", error).as_instanceof_cause()

    return get


@pytest.fixture
def pool(monkeypatch: Patch) -> Callable[[Exception], WorkerPool]:
    """Return a function that makes a pool, one worker of which has failed to become ready because of an error."""

    def made(error: Exception, **fields: Any) -> WorkerPool:
        unused: Any = None
        pool = WorkerPool(unused, None, {"GPU": 1.0}, {}, fleet=unused, on_event=lambda event: None, **fields)
        member = PooledWorker(SimpleNamespace(_actor_id=b"a"), "bad", "answer", 0.0)
        pool.workers[member.id] = member
        monkeypatch.setattr(ray, "wait", lambda answers, **_: (answers, []))
        monkeypatch.setattr(ray, "get", raised(error))
        monkeypatch.setattr(ray, "kill", lambda actor: None)
        return pool

    return made


def test_a_node_that_cannot_train_ends_the_start_without_a_second_attempt(pool: Any, monkeypatch: Patch) -> None:
    workers = pool(ClusterError("node 10.0.0.2: install torch"))
    workers._collect_prepared()
    assert workers._tried["bad"] == float("inf")  # no worker is started there again
    monkeypatch.setattr(WorkerPool, "tick", lambda self: None)
    policy = PoolPolicy(ScalingConfig(num_workers=1), "auto", None, workers, lambda event: None)
    with pytest.raises(ClusterError, match="install torch"):
        policy.make_decision_for_non_running_worker_group()


def test_a_run_goes_on_without_a_node_that_cannot_train(pool: Any) -> None:
    events: list[Any] = []
    workers = pool(ClusterError("node 10.0.0.2: install torch"), trained_on={"good"})
    workers.on_event = events.append
    workers._collect_prepared()
    assert workers._tried["bad"] == float("inf")
    assert [(event.code, event.detail) for event in events] == [("node_refused", "node 10.0.0.2: install torch")]
    assert "continues without that node: node 10.0.0.2: install torch." in events[0].message


@pytest.mark.parametrize("error", [StorageError("away"), ImportError("no module")])
def test_another_failure_is_tried_again(pool: Any, error: Exception) -> None:
    workers = pool(error)
    workers._collect_prepared()
    assert workers.refusal is None
    assert workers._tried["bad"] < float("inf")


def test_the_refusal_of_a_start_reaches_the_user_as_it_is() -> None:
    refusal = ClusterError("node 10.0.0.2: install torch")
    assert refusal_of(ControllerError(refusal)) is refusal
    assert refusal_of(ControllerError(ValueError("a bug"))) is None
    saved = CheckpointError("the run was saved with the optimizer SGD of torch")
    assert str(refusal_of(WorkerGroupError("reported by Ray", {0: saved}))) == str(saved)


@pytest.mark.parametrize(
    ("present", "types", "expected"),
    [
        ({"CPU": 4.0}, None, False),
        ({"CPU": 4.0, "GPU": 1.0}, None, True),
        ({}, {"head": {"resources": {"CPU": 0}}, "l4": {"resources": {"CPU": 4, "GPU": 1}, "max_workers": 3}}, True),
        ({}, {"l4": {"resources": {"CPU": 4, "GPU": 1}}}, True),
        ({}, {"l4": {"resources": {"CPU": 4, "GPU": 1}, "max_workers": 0}}, False),
        ({"CPU": 4.0}, {"cpus": {"resources": {"CPU": 4}, "max_workers": 3}, "detected": {}}, False),
    ],
)
def test_a_cluster_offers_the_gpus_of_its_nodes_and_of_those_that_its_autoscaler_can_start(
    monkeypatch: Patch, present: dict[str, float], types: dict[str, Any] | None, expected: bool
) -> None:
    monkeypatch.setattr(cluster_gpus.ray, "cluster_resources", lambda: present)
    monkeypatch.setattr(cluster_gpus, "config_of_cluster", lambda: types and {"available_node_types": types})
    assert offers_gpus() is expected


@contextmanager
def autoscaler(*options: str) -> Iterator[None]:
    """Process with the options of Ray's autoscaler."""
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


def test_the_node_types_are_those_of_the_clusters_own_autoscaler(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_CLUSTER_NAME", raising=False)
    options = {}
    for name in ("ours", "other"):
        (tmp_path / f"{name}.yaml").write_text(f"available_node_types: {{{name}: {{resources: {{GPU: 1}}}}}}")
        options[name] = (f"--logs-dir=/tmp/ray/{name}/logs", f"--autoscaling-config={tmp_path}/{name}.yaml")
    with autoscaler(*options["other"]), autoscaler(*options["ours"]), autoscaler("--logs-dir=/tmp/ray/bare/logs"):
        config = autoscaling_config("ours")
        assert config is not None
        assert list(config["available_node_types"]) == ["ours"]
        assert autoscaling_config("bare") is None
    assert autoscaling_config("ours") is None


def test_in_kubernetes_the_node_types_are_the_groups_of_the_cluster(monkeypatch: Patch, tmp_path: Path) -> None:
    spec = yaml.safe_load((ROOT / "docs" / "kuberay-rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    cluster = {"metadata": {"name": "ours", "namespace": "team"}, "spec": spec}
    asked = []

    class Api:
        def __init__(self, namespace: str):
            self._namespace = namespace

        def get(self, path: str) -> Any:
            asked.append((self._namespace, path))
            return cluster

    monkeypatch.setenv("RAY_CLUSTER_NAME", "ours")
    monkeypatch.setenv("RAY_CLUSTER_NAMESPACE", "team")
    monkeypatch.setattr(cluster_gpus, "KubernetesHttpApiClient", Api)
    assert starts_gpus(autoscaling_config("any"))
    assert asked == [("team", "rayclusters/ours")]

    monkeypatch.delenv("RAY_CLUSTER_NAMESPACE")  # as with KubeRay before 1.6
    assert autoscaling_config("any") is None, "this pod has no account"
    (tmp_path / "namespace").write_text("of-the-pod")
    monkeypatch.setattr(cluster_gpus, "NAMESPACE_FILE", tmp_path / "namespace")
    assert starts_gpus(autoscaling_config("any"))
    assert asked[-1] == ("of-the-pod", "rayclusters/ours")

    def refused(self: Any, path: str) -> Any:
        raise cluster_gpus.requests.HTTPError("403: this account may not read it")

    monkeypatch.setattr(Api, "get", refused)
    assert autoscaling_config("any") is None


@pytest.mark.parametrize("file", ["cluster.yaml", "docs/cluster-gcp.yaml"])
def test_the_recipes_that_we_ship_bring_gpus(file: str) -> None:
    assert starts_gpus(yaml.safe_load((ROOT / file).read_text()))
