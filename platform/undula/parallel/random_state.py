"""State of all random number generators of this process: those of torch, NumPy and Python."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """State of the random number generators at one moment."""

    of_torch: Tensor
    of_cuda: list[Tensor]
    """State of each GPU's generator; empty if CUDA was not in use."""
    of_python: Any
    of_numpy: Any

    @classmethod
    def now(cls) -> "RandomState":
        is_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        of_cuda = torch.cuda.get_rng_state_all() if is_cuda else []
        return cls(torch.get_rng_state(), of_cuda, random.getstate(), np.random.get_state())

    def put_back(self) -> None:
        torch.set_rng_state(self.of_torch)
        if self.of_cuda:
            torch.cuda.set_rng_state_all(self.of_cuda)
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Put the random number generators back on exit, so that code after the block draws what it would have drawn without the block."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.put_back()
