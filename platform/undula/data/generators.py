"""Random number generators of this process on the CPU: those of torch, Python and NumPy, which code of a script draws from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_generators(key: int) -> None:
    """Seed the generators with a 64-bit key. Generators of GPUs are not changed."""
    # torch.manual_seed formats the stack for each kind of device that is not in use, which takes a millisecond in total.
    torch.default_generator.manual_seed(for_torch(key))
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


def for_torch(key: int) -> int:
    """Return a 64-bit key as a seed for torch, which has 63 bits."""
    return key >> 1


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put the generators back on exit, so that code after the block draws what it would have drawn without the block."""
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
