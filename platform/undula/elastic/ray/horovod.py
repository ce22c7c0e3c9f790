"""Horovod beside torch's process group, in the thread that trains: torch's small one carries decisions, Horovod the gradients."""

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

from undula.elastic.pure.spec import HorovodSpec
from undula.elastic.ray.actor import worker_state
from undula.elastic.ray.backend import ElasticTorchBackend, InProcessGroup
from undula.elastic.rendezvous import RendezvousServer
from undula.elastic.sockets import cut_sockets, open_sockets
from undula.errors import ClusterError
from undula.recovery.worker_state import WorkerState

WITHOUT_EFFECT = ("verbose", "ssh_port", "ssh_identity_file", "ssh_str", "placement_group_timeout_s")
"""Arguments of Ray's former HorovodConfig for what Ray itself does, or what nothing used."""

FIXED_PARAMETERS = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME")

_variables: Sequence[dict[str, str]] = ()
_has_begun = False
"""Whether this process has been in a group of Horovod's."""


class HorovodConfig(BackendConfig):
    """Horovod for `ElasticHorovodTrainer`, with the arguments of Ray's former class.

    Args:
        key: a secret from which that of each group's rendezvous is derived, beside what is drawn anew for each.
        fields: those of HorovodSpec, the job's `horovod` section. Those of Ray's that have no meaning here are taken, with a warning.

    Raises:
        pydantic.ValidationError: a field has no such value.
    """

    def __init__(self, *, key: str | bytes | None = None, **fields: Any):
        ignored = [name for name in WITHOUT_EFFECT if fields.pop(name, None) is not None]
        if ignored:
            warnings.warn(
                f"HorovodConfig({', '.join(ignored)}): has no effect, as Ray starts the workers", stacklevel=2
            )
        self.spec = HorovodSpec(**fields)
        self.key = key

    @property
    def backend_cls(self) -> type["ElasticHorovodBackend"]:
        return ElasticHorovodBackend

    @property
    def train_func_context(self) -> type["InHorovodGroup"]:
        return InHorovodGroup


class ElasticHorovodBackend(ElasticTorchBackend):
    """Tells the ranks where to meet, each time at a new secret; lives in the controller, and serves the rendezvous there."""

    _server: RendezvousServer | None = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        super().on_start(worker_group, TorchConfig(backend="gloo"))
        if self._server is None:
            self._server = RendezvousServer(node_address(), backend_config.key)
        workers = [worker.metadata for worker in worker_group.get_workers()]
        has_gpus = any(worker.gpu_ids for worker in workers)
        group = time.strftime("%Y%m%d-%H%M%S")
        common = {**backend_config.spec.variables(group, has_gpus), **self._server.begin_group()}
        hosts = [worker.node_id for worker in workers]
        worker_group.execute(use_variables, [{**common, **place} for place in places(hosts)], backend_config.spec.nics)


def node_address() -> str:
    """Under which Ray knows this node."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def places(hosts: Sequence[str]) -> list[dict[str, str]]:
    """By rank the variables that say where it stands, given the host of each. `CROSS` counts the hosts that have such a local rank."""
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    found = []
    for rank, (host, local_rank) in enumerate(zip(hosts, local_ranks, strict=True)):
        peers = [each for each, local in zip(hosts, local_ranks, strict=True) if local == local_rank]
        place = {
            "RANK": rank,
            "SIZE": len(hosts),
            "LOCAL_RANK": local_rank,
            "LOCAL_SIZE": hosts.count(host),
            "CROSS_RANK": peers.index(host),
            "CROSS_SIZE": len(peers),
            "HOSTNAME": host,
        }
        found.append({f"HOROVOD_{name}": str(value) for name, value in place.items()})
    return found


def use_variables(by_rank: Sequence[dict[str, str]], nics: Sequence[str] | None) -> None:
    """Called in each worker before its train function."""
    global _variables
    interface = interface_of(node_address(), nics, psutil.net_if_addrs())
    _variables = [{**each, "HOROVOD_GLOO_IFACE": interface} for each in by_rank]
    if nics:
        os.environ["NCCL_SOCKET_IFNAME"] = ",".join(nics)


def interface_of(address: str, nics: Sequence[str] | None, here: dict[str, Any]) -> str:
    """The network interface of this node to use: the first of `nics` that is here, or the one with this address.

    Raises:
        ClusterError: none of them is here.
    """
    found = [name for name in nics or () if name in here]
    found += [name for name, all_of in here.items() if not nics and address in [each.address for each in all_of]]
    if not found:
        wanted = f"none of {', '.join(nics)}" if nics else f"no network interface with the address {address}"
        raise ClusterError(f"horovod.nics: this node has {wanted}: give one of {', '.join(sorted(here))}")
    return found[0]


class InHorovodGroup(InProcessGroup):
    """The train function runs in this context, where torch's group is there as well, and `hvd.init()` has been called."""

    def __enter__(self) -> None:
        super().__enter__()  # so that Horovod, which ends the process where a rank does not come, begins when all are there
        before = open_sockets()
        begin(_variables[ray.train.get_context().get_world_rank()], worker_state())
        worker_state().collective_sockets = open_sockets() - before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            cut_sockets(worker_state().collective_sockets)  # or the end would wait for ranks that are lost
        hvd: Any = import_module("horovod.torch")
        hvd.shutdown()
        hvd.mpi_ops._handle_map.clear()  # what was not waited for holds the former group's gradients
        worker_state().collective_sockets = frozenset()
        super().__exit__(kind, error, trace)


def begin(variables: Mapping[str, str], state: WorkerState) -> None:
    """`hvd.init()` with these variables, in a process that may have been in groups before, beside others that have not.

    Horovod 0.28.1 as it comes keeps its parameters from one `init` to the next, and spoils them (parameter_manager.cc,
    BayesianParameter::SetValue): where the cycle time is fixed, a second `init` writes that one's default over the fusion threshold,
    1 MiB in place of 128. Ranks with the one and ranks with the other fuse different gradients, or write past the smaller buffer. So
    each process is alone in a first group that does nothing, and all of a group have had their second `init`. With both of them fixed
    that one ends the process, and what autotune found stays as well: such a process is in one group only. `undula build-horovod` fixes
    the first two in the source; this code does not tell its builds apart from others.
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
    is_alone = variables["HOROVOD_SIZE"] == "1"
    os.environ.update({name: value for name, value in variables.items() if not (is_alone and "RENDEZVOUS" in name)})


def import_horovod() -> Any:
    """Horovod for torch.

    Raises:
        ClusterError: it is not there, or was built for another torch.
    """
    try:
        return import_module("horovod.torch")
    except ImportError as error:
        reason = "" if isinstance(error, ModuleNotFoundError) else f" with this torch ({error})"
        raise ClusterError(
            f"engine: horovod needs Horovod, which is not installed here{reason}: `undula build-horovod` builds and installs it"
        ) from error


def check(spec: HorovodSpec, has_gpus: bool) -> None:
    """Whether the Horovod that is installed here can do what a spec says, for workers with GPUs or without.

    Raises:
        ClusterError: it is not there, or lacks something.
    """
    hvd = import_horovod()
    for what, is_wanted in (
        ("engine: horovod with GPUs", has_gpus),
        ("horovod.hierarchical_allreduce", spec.hierarchical_allreduce),
    ):
        if is_wanted and not hvd.nccl_built():
            raise ClusterError(
                f"{what} needs a Horovod with NCCL, and this one has none: HOROVOD_GPU_OPERATIONS=NCCL undula build-horovod"
            )
