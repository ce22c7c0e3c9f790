"""Tests of the random numbers that a script draws: they belong to what they are drawn for."""

import random
from itertools import product

import numpy as np
import torch

from undula.train.randomness import seed_micro_batch


def drawn(*key: int) -> tuple[float, float, float]:
    seed_micro_batch(*key)  # type: ignore[call-arg, arg-type]
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_each_micro_batch_of_each_virtual_worker_has_random_numbers_of_its_own() -> None:
    keys = [*product((0, 7), (0, 1), (0, 1, 2), (0, 1))]
    numbers = [drawn(*key) for key in keys]
    for of_one in zip(*numbers, strict=True):
        assert len({*of_one}) == len(keys)
    assert [drawn(*key) for key in keys] == numbers
