"""Torch's process group, which the training thread creates and destroys, so that a process can join one worker group after another."""

import os
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.exceptions import RayError
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend
from ray.train.v2._internal.execution.context import get_train_context
from torch._C._distributed_c10d import HashStore, TCPStore

from undula.elastic.network import check_connection
from undula.elastic.ray.actor import name_of_node, worker_state

RENDEZVOUS_TIMEOUT_S = 10.0
"""Maximum seconds for which a rank waits until all ranks have joined."""


@dataclass(frozen=True)
class Rendezvous:
    """Address and backend of a group's process group."""

    address: str
    port: int
    backend: str
    timeout_s: float
    """Maximum seconds for which a rank waits for the others in a collective."""

    def store(self, rank: int, world_size: int) -> TCPStore:
        """Return the key-value store through which the ranks find each other. Rank 0 serves it, and waits until all have joined.

        Raises:
            torch.distributed.DistStoreError: Not all ranks have joined in RENDEZVOUS_TIMEOUT_S.
        """
        timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
        if rank > 0:
            store = TCPStore(
                self.address, self.port, world_size, is_master=False, timeout=timeout, wait_for_workers=False
            )
            store.set(f"joined/{rank}", "")
            return store
        assert _server is not None
        _server.wait([f"joined/{other}" for other in range(1, world_size)], timeout)
        return _server


_rendezvous: Rendezvous | None = None
_server: TCPStore | None = None
"""Store of the next group or the present one, if this process serves it."""


def set_rendezvous(rendezvous: Rendezvous) -> None:
    """Set the rendezvous of the next group. This function runs in each worker before its train function."""
    global _rendezvous
    _rendezvous = rendezvous
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = rendezvous.address, str(rendezvous.port)
    _set_torch_distributed_env_vars()  # type: ignore[no-untyped-call]


class InProcessGroup(AbstractContextManager[None]):
    """Context of the train function in which this process is a member of the process group."""

    def __enter__(self) -> None:
        assert _rendezvous is not None
        context = ray.train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
        device = ray.train.torch.get_device()
        if device.type == "cuda":  # without this, NCCL and new tensors would use the first GPU
            torch.cuda.set_device(device)
        try:
            # A single rank needs no server, which would take 15 ms to start.
            store = HashStore() if world_size == 1 else _rendezvous.store(rank, world_size)
            if world_size > 1:  # gloo's own connections would be tried until the limit of a collective
                check_connection(store, rank, world_size, name_of_node())
            timeout = timedelta(seconds=_rendezvous.timeout_s)
            dist.init_process_group(_rendezvous.backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
            store.set_timeout(timeout)  # ranks may come far apart to the first collective of NCCL, which uses the store
        except Exception:
            worker_state().is_sound = True  # another rank did not join, so this process is not at fault
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not dist.is_initialized():  # a script of torchrun destroys it at its end
            pass
        elif (
            error is not None and dist.get_backend() == "nccl"
        ):  # whose regular shutdown would wait forever for a lost rank
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
        close_server()
        with suppress(RayError):  # the controller may be gone
            get_train_context().controller_actor.wake.remote()


@dataclass
class ElasticTorchConfig(TorchConfig):
    """TorchConfig whose process group exists only while the train function runs."""

    @property
    def backend_cls(self) -> type["ElasticTorchBackend"]:
        return ElasticTorchBackend

    @property
    def train_func_context(self) -> type[InProcessGroup]:
        return InProcessGroup


class ElasticTorchBackend(_TorchBackend):
    """Backend that passes the rendezvous to the ranks. The training threads of the ranks then create the process group."""

    share_cuda_visible_devices = False
    """False, so that each process sees only its own GPUs: it has already created a CUDA context when it joins the other processes on its
    node."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        gpus = worker_group.get_resources_per_worker().get("GPU", 0)
        backend = backend_config.backend or ("nccl" if gpus else "gloo")
        address, port = worker_group.execute_single(0, _address_of_server, len(worker_group))
        worker_group.execute(set_rendezvous, Rendezvous(address, port, backend, float(backend_config.timeout_s)))

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Do nothing, because the contexts of the train functions have already destroyed their process groups."""


def _address_of_server(world_size: int) -> tuple[str, int]:
    """Serve the store of the next group, and return its address.

    A rank that came before the server would wait for the retry of its connection, which takes half a second. A single rank needs no server.
    """
    global _server
    from ray.train._internal.utils import get_address_and_port

    address, port = get_address_and_port()
    close_server()
    if world_size > 1:
        timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
        _server = TCPStore(str(address), 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        port = _server.port
    return str(address), int(port)


def close_server() -> None:
    """Forget the store that this process has served."""
    global _server
    _server = None
