"""GPUs of a process of Ray: those that it has reserved, and no others."""

import os

import ray
import torch
from ray.air._internal.device_manager import get_torch_device_manager_by_context

from undula.elastic.pure.nodes import fix_of_unseen_gpus
from undula.elastic.ray.environment import NO_GPU
from undula.errors import ClusterError


def reserved_device() -> torch.device:
    """Return the first GPU that this process has reserved, or the CPU if it has reserved none."""
    device: torch.device = get_torch_device_manager_by_context().get_devices()[0]
    return device


def hide_unreserved_gpus() -> None:
    """Hide all GPUs from this process if it has reserved none. This has no effect once the process has used CUDA."""
    if not ray.get_gpu_ids():
        os.environ.update(NO_GPU)


def refuse_unseen_gpus() -> None:
    """Check that torch sees the GPUs that this process has reserved.

    Raises:
        ClusterError: It sees fewer.
    """
    reserved, seen = len(ray.get_gpu_ids()), torch.cuda.device_count()
    if seen >= reserved:
        return
    raise ClusterError(
        f"Ray has reserved {reserved} GPU{'s' * (reserved > 1)}, but torch {torch.__version__} sees {seen}; "
        f"{fix_of_unseen_gpus(torch.version.cuda)}, or set workers.gpus=0 to train on CPUs"
    )
