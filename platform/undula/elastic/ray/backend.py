"""Torch's process group, made and destroyed in the thread that trains, so that a worker's process can be in one after another."""

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

from undula.elastic.ray.actor import worker_state

RENDEZVOUS_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group meet."""

    address: str
    port: int
    backend: str
    timeout_s: float

    def store(self, rank: int, world_size: int) -> TCPStore:
        """Where ranks find each other; rank 0 serves it."""
        timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
        return TCPStore(self.address, self.port, world_size, is_master=rank == 0, timeout=timeout)


_rendezvous: Rendezvous | None = None


def meet_at(rendezvous: Rendezvous) -> None:
    """Called in each worker before its train function."""
    global _rendezvous
    _rendezvous = rendezvous
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = rendezvous.address, str(rendezvous.port)
    _set_torch_distributed_env_vars()  # type: ignore[no-untyped-call]


class InProcessGroup(AbstractContextManager[None]):
    """The train function runs in this context."""

    def __enter__(self) -> None:
        assert _rendezvous is not None
        context = ray.train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
        if torch.cuda.is_available():
            torch.cuda.set_device(ray.train.torch.get_device())
        try:
            # A rank that is alone meets nobody, and saves the 15 ms of a server.
            store = HashStore() if world_size == 1 else _rendezvous.store(rank, world_size)
            dist.init_process_group(
                _rendezvous.backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=_rendezvous.timeout_s),
            )
        except Exception:
            worker_state().is_sound = True  # another rank has not come
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A rank that is lost never answers NCCL's orderly end.
        if error is not None and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
        with suppress(RayError):  # a controller that is gone needs no word
            get_train_context().controller_actor.wake.remote()


@dataclass
class ElasticTorchConfig(TorchConfig):
    """A TorchConfig whose process group lives and dies with the train function."""

    @property
    def backend_cls(self) -> type["ElasticTorchBackend"]:
        return ElasticTorchBackend

    @property
    def train_func_context(self) -> type[InProcessGroup]:
        return InProcessGroup


class ElasticTorchBackend(_TorchBackend):
    """Tells the ranks where to meet; the rest happens in their threads."""

    share_cuda_visible_devices = False
    """Each process sees its own GPUs alone: by the time that it joins others it has a CUDA context."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        gpus = worker_group.get_resources_per_worker().get("GPU", 0)
        backend = backend_config.backend or ("nccl" if gpus else "gloo")
        address, port = worker_group.execute_single(0, _free_address)
        worker_group.execute(meet_at, Rendezvous(address, port, backend, float(backend_config.timeout_s)))

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """The train functions' contexts have done it."""


def _free_address() -> tuple[str, int]:
    from ray.train._internal.utils import get_address_and_port

    address, port = get_address_and_port()
    return str(address), int(port)
