"""Tests of how the random number generators of a process are seeded."""

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from undula.data.script.items import seed_generators


def drawn() -> tuple[float, float, list[float], list[float]]:
    """Draw from each generator, of Python's and NumPy's normal distributions an odd number, so that they keep one for the next draw."""
    return random.gauss(0, 1), random.random(), np.random.randn(3).tolist(), torch.randn(3).tolist()


@given(st.integers(0, 2**64 - 1))
def test_generators_draw_what_their_own_seed_functions_make_them_draw(key: int) -> None:
    torch.manual_seed(key >> 1)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    expected = drawn()
    seed_generators(key)
    assert drawn() == expected
