"""Random state keyed by what is computed, not by who computes it."""

import random

import numpy as np
import torch

from undula.plan.keys import key64


def seed_weights(seed: int) -> None:
    """Seed what runs before the first step: the same on every rank."""
    _seed_all(key64("weights", seed))


def seed_micro_batch(seed: int, step: int, virtual_worker: int, micro_batch: int) -> None:
    """Seed dropout and the like for one micro-batch: the same on whichever rank it runs."""
    _seed_all(key64("micro-batch", seed, step, virtual_worker, micro_batch))


def _seed_all(key: int) -> None:
    torch.manual_seed(key >> 1)  # all devices; torch takes 63 bits here
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
