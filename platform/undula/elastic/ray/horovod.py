"""Horovod and torch's process group in the training thread. Horovod reduces gradients; torch's group is for the ranks' decisions."""

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import TracebackType
from typing import Any

import psutil
import ray
import ray.train
from ray.train.backend import BackendConfig
from ray.train.torch import TorchConfig

from undula.elastic.network import GLOO, NCCL, Interfaces, first_of, node_address
from undula.elastic.pure.spec import HorovodSpec
from undula.elastic.ray.actor import worker_state
from undula.elastic.ray.backend import ElasticTorchBackend, InProcessGroup
from undula.elastic.rendezvous import RendezvousServer
from undula.elastic.sockets import cut_sockets, open_sockets
from undula.errors import ClusterError
from undula.recovery.worker_state import WorkerState

WITHOUT_EFFECT = ("verbose", "ssh_port", "ssh_identity_file", "ssh_str", "placement_group_timeout_s")
"""Arguments of Ray's former HorovodConfig that have no effect here, because Ray starts the workers or because nothing used them."""
FIXED_PARAMETERS = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME")
"""Variables that, if both are set, prevent a process from initializing Horovod more than once."""

_variables: Sequence[dict[str, str]] = ()
_has_begun = False
"""Whether this process has initialized Horovod before."""


class HorovodConfig(BackendConfig):
    """Configuration of Horovod for `ElasticHorovodTrainer`, with the arguments of Ray's former class.

    Args:
        key: Secret that enters the secret of each group's rendezvous, together with fresh random bytes.
        torch_timeout_s: Maximum seconds for which a rank waits for the others in a collective of torch; by default that of TorchConfig.
        fields: Fields of HorovodSpec, the job's `horovod` section. Arguments of Ray's class that have no effect cause a warning.

    Raises:
        pydantic.ValidationError: A field does not exist, or does not accept its value.
    """

    def __init__(self, *, key: str | bytes | None = None, torch_timeout_s: int | None = None, **fields: Any):
        ignored = [name for name in WITHOUT_EFFECT if fields.pop(name, None) is not None]
        if ignored:
            warnings.warn(
                f"HorovodConfig({', '.join(ignored)}) has no effect, because Ray starts the workers", stacklevel=2
            )
        self.spec = HorovodSpec(**fields)
        self.key = key
        self.torch_config = TorchConfig(backend="gloo", timeout_s=torch_timeout_s or TorchConfig.timeout_s)

    @property
    def backend_cls(self) -> type["ElasticHorovodBackend"]:
        return ElasticHorovodBackend

    @property
    def train_func_context(self) -> type["InHorovodGroup"]:
        return InHorovodGroup


class ElasticHorovodBackend(ElasticTorchBackend):
    """Backend that serves the rendezvous in the controller, and passes its address and a new secret to the ranks of each group."""

    _server: RendezvousServer | None = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        super().on_start(worker_group, backend_config.torch_config)
        if self._server is None:
            self._server = RendezvousServer(node_address(), backend_config.key)
        workers = [worker.metadata for worker in worker_group.get_workers()]
        has_gpus = any(worker.gpu_ids for worker in workers)
        group = time.strftime("%Y%m%d-%H%M%S")
        common = {**backend_config.spec.variables(group, has_gpus), **self._server.begin_group()}
        hosts = [worker.node_id for worker in workers]
        worker_group.execute(use_variables, [{**common, **place} for place in places(hosts)], backend_config.spec.nics)


def places(hosts: Sequence[str]) -> list[dict[str, str]]:
    """Return the environment variables with the position of each rank, given the host of each rank.

    HOROVOD_CROSS_SIZE is the number of hosts that have a rank with the same local rank, and HOROVOD_CROSS_RANK is the index of the rank's
    host among them.
    """
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    variables = []
    for rank, (host, local_rank) in enumerate(zip(hosts, local_ranks, strict=True)):
        peers = [peer for peer, local in zip(hosts, local_ranks, strict=True) if local == local_rank]
        place = {
            "RANK": rank,
            "SIZE": len(hosts),
            "LOCAL_RANK": local_rank,
            "LOCAL_SIZE": hosts.count(host),
            "CROSS_RANK": peers.index(host),
            "CROSS_SIZE": len(peers),
            "HOSTNAME": host,
        }
        variables.append({f"HOROVOD_{name}": str(value) for name, value in place.items()})
    return variables


def use_variables(by_rank: Sequence[dict[str, str]], nics: Sequence[str] | None) -> None:
    """Set the environment variables of each rank for the next group. This function runs in each worker before its train function."""
    global _variables
    interface = interface_of(nics, psutil.net_if_addrs())
    _variables = [{**variables, "HOROVOD_GLOO_IFACE": interface} for variables in by_rank]
    if nics:
        os.environ[NCCL] = ",".join(nics)


def interface_of(nics: Sequence[str] | None, here: Interfaces) -> str:
    """Return the network interface to use: the first of `nics` that this node has or, without `nics`, that of gloo.

    Raises:
        ClusterError: This node has no such interface.
    """
    if nics:
        return first_of(nics, "horovod.nics", here)
    if chosen := os.environ.get(GLOO):
        return chosen.partition(",")[0]
    raise ClusterError(
        f"Ray knows this node under {node_address()}, which is the address of none of its network interfaces; set workers.interfaces to "
        f"interfaces that connect all nodes (here: {', '.join(sorted(here))})"
    )


class InHorovodGroup(InProcessGroup):
    """Context of the train function in which Horovod is initialized and torch's process group exists."""

    def __enter__(self) -> None:
        super().__enter__()  # must come first: Horovod ends the process if a rank is missing
        before = open_sockets()
        begin(_variables[ray.train.get_context().get_world_rank()], worker_state())
        worker_state().collective_sockets = open_sockets() - before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            cut_sockets(worker_state().collective_sockets)  # otherwise the shutdown would wait for lost ranks
        hvd: Any = import_module("horovod.torch")
        hvd.shutdown()
        worker_state().collective_sockets = frozenset()
        super().__exit__(kind, error, trace)


def begin(variables: Mapping[str, str], state: WorkerState) -> None:
    """Call `hvd.init()` with these variables. This process may have been in other groups before, while other ranks may be new.

    An unpatched Horovod 0.28.1 keeps its parameters from one `init` to the next and corrupts them (parameter_manager.cc,
    BayesianParameter::SetValue). This has three consequences:

    1. If the cycle time is fixed, a second `init` overwrites the fusion threshold of 128 MiB with the default of the cycle time, which
       results in 1 MiB. Ranks with different thresholds fuse different gradients, or write past the end of the smaller buffer. Therefore
       each process first initializes Horovod in a group that consists of this process only, so that every rank of a real group has called
       `init` before.
    2. If both parameters are fixed, a second `init` ends the process. Such a process joins only one group.
    3. The values that autotune has found persist. A process with autotune also joins only one group.

    `undula build-horovod` fixes the first two in Horovod's source. Other builds cannot be distinguished from it here, so all builds are
    treated alike.
    """
    global _has_begun
    hvd: Any = import_module("horovod.torch")
    wanted = {**os.environ, **variables}
    state.is_spent = wanted.get("HOROVOD_AUTOTUNE", "0") != "0" or all(name in wanted for name in FIXED_PARAMETERS)
    if not (_has_begun or state.is_spent):
        _use({**{name: value for name, value in variables.items() if "TIMELINE" not in name}, **places(["alone"])[0]})
        hvd.init()
        hvd.shutdown()
    _has_begun = True
    _use(variables)
    hvd.init()


def _use(variables: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("HOROVOD_GLOO_RENDEZVOUS")]:
        del os.environ[name]
    is_single = variables["HOROVOD_SIZE"] == "1"
    os.environ.update({name: value for name, value in variables.items() if not (is_single and "RENDEZVOUS" in name)})


def import_horovod() -> Any:
    """Return the module `horovod.torch`.

    Raises:
        ClusterError: Horovod is not installed, or was built for another torch.
    """
    try:
        return import_module("horovod.torch")
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        problem = (
            "Horovod, which is not installed here"
            if is_missing
            else f"a Horovod that was built for this torch ({error})"
        )
        raise ClusterError(
            f"engine: horovod needs {problem}; run `undula build-horovod` to build and install it"
        ) from error


def check(has_gpus: bool) -> None:
    """Check that the installed Horovod supports a job.

    Args:
        has_gpus: Whether the workers use GPUs.

    Raises:
        ClusterError: Horovod is not installed, or lacks a feature.
    """
    hvd = import_horovod()
    if has_gpus and not hvd.nccl_built():
        raise ClusterError(
            "engine: horovod with GPUs needs a Horovod with NCCL, and this one has none; run HOROVOD_GPU_OPERATIONS=NCCL undula "
            "build-horovod, or set workers.gpus=0"
        )
