"""Tests of a plan's answers to targets."""

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from jobs_kit import LANGUAGE_MODEL
from rich.console import Console

import undula.driver.plan_job as plan_job_module
from undula.cluster.prices import load_prices
from undula.config.job import JobSpec
from undula.data.prepare.write import array_column, array_field, write_shards
from undula.data.spec import DataSpec
from undula.data.stored.mixture import Mixture
from undula.driver.count_job import JobCount, data_count
from undula.driver.plan_job import SHARDED, Planned, plan_job, target_of
from undula.driver.plan_table import dollars_text, hours_text, print_plan, rate_text, text_of_none
from undula.driver.print_job import run_for_output
from undula.errors import SpecError
from undula.parallel.spec import ActivationsSpec
from undula.plan.candidates import Candidate, Offer
from undula.plan.gpus import GPUS
from undula.plan.host_memory import DataCount
from undula.plan.memory import Parts, PassCount, SplitTensor, StateCount, UnitCount
from undula.plan.plan import Plan, PlanSpec
from undula.plan.step_time import StepSeconds
from undula.plan.work import Work
from undula.state.processes import is_alive
from undula.storage import Store
from undula.train.dry_run.counting import Setting

COUNTED = JobCount(JobSpec(name="job"), StateCount(*[0] * 10), {}, True, 1, 512)
PLANNED = Planned(Setting("fp32", ActivationsSpec(), 1), COUNTED, ())


def test_tokens_are_a_target_only_if_they_are_known() -> None:
    target = target_of("tokens/s=5e4")
    assert (target.kind, target.limit) == ("tokens/s", 5e4)
    assert PLANNED.choice(target) is None, "there are no configurations"
    unknown = replace(PLANNED, counted=replace(COUNTED, tokens=None))
    assert unknown.choice(target_of("samples/s=5")) is None
    with pytest.raises(
        SpecError, match=r"--target tokens/s=N needs batches whose integer tensors are \[samples, length\]"
    ):
        unknown.choice(target)


def printed_plan(planned: Planned) -> str:
    text = StringIO()
    print_plan(planned, planned.choice(None), console=Console(file=text, width=100))
    return text.getvalue()


def candidate(gpu: str, hours: float, dollars: float | None = 1.0) -> Candidate[Setting]:
    parts, step = Parts(*[0] * len(fields(Parts))), StepSeconds(*[0.1] * len(fields(StepSeconds)))
    offer = Offer(GPUS[gpu], "machine", dollars, None)
    return Candidate(offer, PLANNED.own, 1, 1, parts, 2**34, step, 10.0, None, 1.0, 0.5, hours, hours)


def test_a_job_that_takes_seconds_has_a_sentence_in_place_of_a_table() -> None:
    small = replace(PLANNED, candidates=(candidate("T4", 0.004), candidate("L4", 0.002)))
    printed = printed_plan(small)
    assert printed.startswith(
        "The job is too small for kinds of GPUs and numbers of workers to differ: all steps take about 14 s"
    )
    assert "GiB  " not in printed
    assert "cost" in printed_plan(replace(small, candidates=(*small.candidates, candidate("A100-40", 0.02))))


def test_a_setting_that_the_model_cannot_have_and_prices_that_are_not_known_are_named() -> None:
    counted = replace(COUNTED, left_out={"precision.compute=bf16": "TypeError: it has no kernel"})
    printed = " ".join(printed_plan(replace(PLANNED, counted=counted, candidates=(candidate("T4", 5.0),))).split())
    assert (
        "precision.compute=bf16 is left out, because the model failed with it (TypeError: it has no kernel)." in printed
    )
    assert "– no price is known, give --prices" in printed


def test_a_plan_in_which_nothing_fits_names_the_stage_of_sharding_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    own, spec = Setting("fp32", ActivationsSpec(), 1), JobSpec(name="job", plan=PlanSpec(global_batch=4))
    size = 352 * 2**20
    units = (UnitCount(()), *[UnitCount((SplitTensor(352, 2**20, trains=True, state_row_bytes=2**21),))] * 16)
    whole = StateCount(0, 0, 16 * size, 0, 0, 16 * size, size, 32 * size, 0, 0)
    passes = {own: PassCount(1, 0, 0, 0, 0, 0, Work(1.0, 1.0, 1.0))}
    asked: list[str] = []

    def counted_by_script(script: Path, job: Path, overrides: Sequence[str], **others: Any) -> JobCount:
        asked.extend(overrides)
        state = replace(whole, units=units) if SHARDED in overrides else whole
        return JobCount(spec, state, passes, True, 1, None)

    monkeypatch.setattr(plan_job_module, "counted_by_script", counted_by_script)

    def planned(gpu: str, *overrides: str) -> Planned:
        return plan_job(
            LANGUAGE_MODEL.with_suffix(".yaml"), overrides, [gpu], [1, 2], (0.0, 1e9), load_prices(None), 0.0
        )

    higher = planned("L4").higher
    assert higher is not None
    assert (higher.stage, higher.candidate.workers, higher.candidate.fits) == (3, 2, True)
    text = text_of_none(higher)
    assert text.startswith(
        "No configuration fits as the job is sharded; with sharding.stage=3, each of 2 workers needs "
    )
    printed = printed_plan(planned("L4"))
    (row,) = [line for line in printed.splitlines() if line.startswith(" S3 ")]
    assert row.split()[1:5] == ["L4", "2", "fp32", "all"]
    assert "; S3 what fits with sharding.stage=3" in " ".join(printed.split())
    assert planned("T4").higher is None, "the states are too large in each stage"
    asked.clear()
    assert planned("H100").higher is None, "the job fits as it is"
    assert not any(each.startswith("sharding") for each in asked)


def test_lines_of_a_script_are_seen_at_once_and_it_ends_with_the_command(tmp_path: Path) -> None:
    script, seen = tmp_path / "train.py", list[psutil.Process]()
    script.write_text("import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n")

    def see(line: str) -> None:
        seen.append(psutil.Process(int(line)))
        sys.exit(143)

    with pytest.raises(SystemExit):
        run_for_output(script, tmp_path / "train.yaml", [], [], None, see)
    assert not is_alive(seen[0])


def test_what_reading_takes_follows_from_the_decoded_row_groups(tmp_path: Path) -> None:
    column = array_field("x", pa.float32(), (256,))
    table = pa.table([array_column(column, np.zeros((64, 256), np.float32))], schema=pa.schema([column]))
    manifest = write_shards(Store(str(tmp_path)), [table], table.schema, 64, num_shards=2, row_group_bytes=8 * 1024)
    group, whole = 8 * 1024, 64 * 1024
    spec = JobSpec(
        name="job", data=DataSpec(train=str(tmp_path)), plan=PlanSpec(global_batch=8, virtual_workers=2, window=3)
    )

    def counted(**settings: Any) -> DataCount:
        changed = replace(spec, **{key: replace(getattr(spec, key), **value) for key, value in settings.items()})
        return data_count(manifest, Plan(changed.plan, 64), changed)

    assert counted() == DataCount(3 * group, whole), "the worker reads so few rows itself"
    assert counted(plan={"shuffle": "none"}).window_bytes == group
    assert counted(plan={"window": 100}).window_bytes == whole
    assert counted(plan={"epochs": 3}).ahead_bytes == 3 * whole
    assert counted(plan={"epochs": 100}, data={"prefetch_mib": 1}).ahead_bytes == 2**20
    assert counted(data={"head_mib": 0}).read_tasks == 2
    mixture = Mixture((manifest, manifest), (1.0, 2.0))
    assert data_count(mixture, Plan(spec.plan, 128), spec) == DataCount(6 * group, 2 * whole)


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.5234, "0.52"), (7.31, "7.3"), (1864, "1,864"), (31_234, "31.2k"), (1.25e6, "1.25M"), (2e7, "20M")],
)
def test_rates_fit_into_the_table(rate: float, text: str) -> None:
    assert rate_text(rate) == text


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (0.0001, "0.36 s"),
        (0.01, "36 s"),
        (0.2, "12 min"),
        (41.92, "41.9 h"),
        (161.7, "162 h"),
        (1810.0, "75 d"),
        (30_000.0, "1,250 d"),
    ],
)
def test_durations_fit_into_the_table(hours: float, text: str) -> None:
    assert hours_text(hours) == text


@pytest.mark.parametrize(
    ("dollars", "text"), [(None, "–"), (72.187, "$72.19"), (1288.4, "$1,288"), (112_389.0, "$112k")]
)
def test_prices_fit_into_the_table(dollars: float | None, text: str) -> None:
    assert dollars_text(dollars) == text
