"""Random number generators of this process on the CPU: those of torch, Python and NumPy, which code of a script draws from."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from numpy.random import mtrand

# Every sample is seeded. What random.seed and np.random.seed do beside the seeding takes 10 us, 2 % of the time to load an image.
_of_python: random.Random = random.seed.__self__  # type: ignore[attr-defined]
_seed_python = super(random.Random, _of_python).seed
_seed_numpy = mtrand._rand.seed


def seed_generators(key: int) -> None:
    """Seed the generators with a 64-bit key. Generators of GPUs are not changed."""
    # torch.manual_seed formats the stack for each kind of device that is not in use, which takes a millisecond in total.
    torch.default_generator.manual_seed(for_torch(key))
    _seed_python(key)
    _of_python.gauss_next = None  # type: ignore[attr-defined]
    _seed_numpy(key & 0xFFFFFFFF)


def for_torch(key: int) -> int:
    """Return a 64-bit key as a seed for torch, which has 63 bits."""
    return key >> 1


def on_host() -> AbstractContextManager[object]:
    """Return a context in which torch makes tensors in host memory, as in loader processes, also if the script has set another default.

    Otherwise it is an empty one, because such a context makes each function of torch slower.
    """
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


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
