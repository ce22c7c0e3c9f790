"""Tests of the rates that passes of reference models show."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from undula.train.dry_run import reference
from undula.train.dry_run.reference import FAMILIES, Reference, measure

CPU = torch.device("cpu")


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_rates_of_the_cpu_are_positive_and_in_order(monkeypatch: pytest.MonkeyPatch, compute: str) -> None:
    monkeypatch.setattr(reference, "LONG_S", 0.0)
    rates = measure(CPU, compute)  # type: ignore[arg-type]
    assert not rates.is_async
    assert 1e8 < rates.flops_per_s <= math.inf
    assert 1e7 < rates.bytes_per_s <= math.inf
    assert 1e-7 < rates.operation_s < 1e-1


@pytest.mark.parametrize("family", FAMILIES)
def test_references_grow_and_the_smallest_is_the_work_of_the_host(
    family: Callable[[torch.device], Iterator[Reference]],
) -> None:
    smallest, second = (each for _, each in zip(range(2), family(CPU), strict=False))
    sizes = [sum(parameter.numel() for parameter in each.module.parameters()) for each in (smallest, second)]
    assert sizes[0] < sizes[1]
    smallest.run("fp32")
    assert all(parameter.grad is not None for parameter in smallest.module.parameters())
