"""Tests of the warning that a deterministic run gets if its machines compute with different bits."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from numbers_job import cpu_run, numbers_job, trained
from ranks import on_ranks

from undula.state.events import WarningEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store
from undula.train.given import arithmetic_of, difference
from undula.train.job import Job


def warnings_of(job: Job) -> list[str]:
    events = events_of(read_ledger(Store(job.run_url)).events, WarningEvent)
    return [event.detail for event in events if event.code == "mixed_machines"]


def _train(rank: int, world_size: int, job: Job, variables: tuple[dict[str, str], ...], steps: int) -> None:
    os.environ |= variables[rank]
    run = cpu_run(job, rank, world_size)
    for _ in zip(range(steps), trained(run), strict=False):
        pass


def settings() -> Iterator[pytest.param]:
    strict = {"MKL_CBWR": "AVX2,STRICT"}
    yield pytest.param(({}, {}), [], id="equal")
    yield pytest.param(
        ({}, strict), ["MKL_CBWR is not set for one worker and AVX2,STRICT for another"], id="another setting"
    )


@pytest.mark.parametrize(("variables", "warnings"), list(settings()))
def test_ranks_that_compute_with_other_bits_are_reported(
    tmp_path: Path, variables: tuple[dict[str, str], ...], warnings: list[str]
) -> None:
    job = replace(numbers_job(tmp_path), deterministic=True)
    on_ranks(2, _train, job, variables, 3)
    assert warnings_of(job) == warnings


def test_a_run_that_continues_with_another_number_of_threads_is_reported(tmp_path: Path) -> None:
    job = replace(numbers_job(tmp_path), deterministic=True)
    for threads in ("1", "1", "2"):
        on_ranks(1, _train, job, ({"OMP_NUM_THREADS": threads},), 2)
    assert warnings_of(job) == ["the number of threads is 1 in the restored state and 2 now"]


def test_the_same_process_does_not_differ_from_itself() -> None:
    one = arithmetic_of(torch.device("cpu"))
    assert difference([one, one]) is None
    assert {"torch", "the CPU", "the number of threads"} <= one.keys()


def test_an_optimizer_that_steps_on_the_cpu_makes_a_difference() -> None:
    on_device, on_host = (arithmetic_of(torch.device("cpu"), is_offloaded=offloads) for offloads in (False, True))
    assert difference([on_device, on_host], ("before", "now")) == (
        "what computes on the CPU is not set before and the optimizer now"
    )


def test_parameters_that_are_gathered_in_another_format_make_a_difference() -> None:
    whole, sharded = (arithmetic_of(torch.device("cpu"), gathered=gathered) for gathered in (None, "bf16"))
    assert difference([whole, sharded]) == (
        "the format of gathered parameters is not set for one worker and bf16 for another"
    )
