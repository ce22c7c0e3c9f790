"""Random state keyed by what is computed, not by who computes it."""

import os
import random

import numpy as np
import torch

from undula.plan.keys import key64


def seed_weights(seed: int) -> None:
    """Seed what runs before the first step: the same on every rank."""
    key = key64("weights", seed)
    torch.manual_seed(_for_torch(key))  # of devices, too, that come into use only afterwards
    _seed(key)


def seed_micro_batch(seed: int, step: int, virtual_worker: int, micro_batch: int) -> None:
    """Seed dropout and the like for one micro-batch: the same on whichever rank it runs."""
    _seed(key64("micro-batch", seed, step, virtual_worker, micro_batch))


def seed_update(seed: int, step: int) -> None:
    """Seed an optimizer that draws random numbers: the same on every rank, whichever micro-batches it has run."""
    _seed(key64("update", seed, step))


def compute_deterministically() -> None:
    """Have torch give the same bits for the same numbers: what it cannot do so it refuses by name."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # for finding bugs, and slow
    torch.backends.cudnn.benchmark = False
    # Threads cut sums into parts. Ray gives a worker as many as it has CPUs, on every node; where it has none, one.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


def _seed(key: int) -> None:
    # For each kind of device that is not in use torch.manual_seed formats the stack, which takes a millisecond together.
    torch.default_generator.manual_seed(_for_torch(key))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(_for_torch(key))
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


def _for_torch(key: int) -> int:
    """It takes 63 bits here."""
    return key >> 1
