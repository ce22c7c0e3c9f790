"""Tests of the certificate: it holds for a run that follows its plan, and names the first difference otherwise."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from report_rows import ledger_of

from undula.config.job import as_tree
from undula.data.planned import PlannedSamples
from undula.data.prepare.write import write_shards
from undula.data.stored.manifest import Manifest
from undula.plan.keys import multiset_digest
from undula.plan.plan import Plan, PlanSpec
from undula.report.data.certificate import agreement, certify, data_of
from undula.report.data.run_record import JobRecord, RecordedRun
from undula.state.events import EndEvent, StartEvent, ValidationEvent, WarningEvent
from undula.state.records import StepRow
from undula.storage import Store

SPEC = PlanSpec(global_batch=12, virtual_workers=4, epochs=2)
ROWS = 50  # an epoch has five steps, the last of which has two samples


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    table = pa.table({"x": np.arange(ROWS)})
    folder = str(tmp_path_factory.mktemp("certificate"))
    return write_shards(Store(folder), [table], table.schema, ROWS, num_shards=2, row_group_bytes=56)


def rows(manifest: Manifest, count: int = 10, attempt: int = 1) -> list[StepRow]:
    """Return the ledger of a run that follows its plan."""
    plan = Plan(SPEC, ROWS)
    planned = PlannedSamples(manifest, plan)
    shapes = [plan.step(step) for step in range(count)]
    return [
        StepRow(
            *(attempt, step, shape.epoch, shape.samples_before + shape.samples, shape.samples, 2, 1 / (step + 1), 0.1),
            *(0.1, 0.1, 0.1, 0.1, multiset_digest(planned.step_ids(step)), float(step)),
        )
        for step, shape in enumerate(shapes)
    ]


def run(manifest: Manifest, steps: list[StepRow], replaced: list[StepRow] | None = None) -> RecordedRun:
    spec = {"plan": as_tree(SPEC), "data": {"train": manifest.url}}
    job = JobRecord("run", Plan(SPEC, ROWS).digest(manifest.digest), spec)
    return RecordedRun(job, ledger_of(steps, replaced=replaced or []), ())


def test_a_run_as_planned_is_certified(manifest: Manifest) -> None:
    recorded = run(manifest, rows(manifest))
    found = certify(recorded, data_of(recorded), against=recorded)
    assert found.holds
    assert any("in 2 complete epochs, each of 50 samples was used exactly once" in text for text in found.proved)
    assert any("10 steps as in run: the same samples" in text for text in found.proved)
    assert any("the weights are the same" in text for text in found.not_proved)


def test_a_run_that_stopped_early_says_why(manifest: Manifest) -> None:
    recorded = run(manifest, rows(manifest, 4))
    rest = "anything about the 6 steps that "
    assert f"{rest}the run has not committed yet" in certify(recorded, manifest).not_proved
    events = (EndEvent("loss has not improved in the last validation", step=4),)
    found = certify(replace(recorded, events=events), manifest)
    assert found.holds
    assert (
        f"{rest}remain, because the run stopped early: loss has not improved in the last validation" in found.not_proved
    )


def elastic_run(manifest: Manifest, world_sizes: list[int], changed: int | None = None) -> RecordedRun:
    """Return the ledger of a run with an elastic batch, which merges two global batches on four workers."""
    spec = replace(SPEC, batch="elastic", batch_workers=2)
    plan = Plan(spec, ROWS)
    planned = PlannedSamples(manifest, plan)
    steps: list[StepRow] = []
    for world_size in world_sizes:
        index = steps[-1].done if steps else 0
        merged = plan.merged_steps(index, world_size)
        shapes = [plan.step(each) for each in range(index, index + merged)]
        samples = sum(shape.samples for shape in shapes)
        ids = np.concatenate([planned.step_ids(each) for each in range(index, index + merged)])
        steps.append(
            StepRow(
                *(1, index, shapes[0].epoch, shapes[0].samples_before + samples, samples, world_size, 1 / (index + 1)),
                *(0.1, 0.1, 0.1, 0.1, 0.1, multiset_digest(ids), float(index)),
                merged_steps=merged if changed != len(steps) else merged + 1,
            )
        )
    recorded = run(manifest, steps)
    job = JobRecord("run", plan.digest(manifest.digest), {**recorded.job.spec, "plan": as_tree(spec)})
    return RecordedRun(job, recorded.ledger, ())


def test_a_run_with_an_elastic_batch_is_certified(manifest: Manifest) -> None:
    # The five steps of an epoch are merged into two, two and one.
    recorded = elastic_run(manifest, [4, 4, 4, 2, 4, 2, 2])
    assert recorded.ledger.steps["merged_steps"].to_pylist() == [2, 2, 1, 1, 2, 1, 1]
    found = certify(recorded, manifest, against=elastic_run(manifest, [4, 4, 4, 2, 2, 2, 2, 2]))
    assert found.holds, found.difference
    assert any("10 steps, each recorded exactly once" in text for text in found.proved)
    assert any("in 2 complete epochs, each of 50 samples was used exactly once" in text for text in found.proved)
    assert any("4 steps as in run" in text for text in found.proved)
    assert any("from step 6 on: with batch: elastic" in text for text in found.not_proved)


def test_merged_steps_that_do_not_fit_the_world_size_are_named(manifest: Manifest) -> None:
    found = certify(elastic_run(manifest, [4, 2, 2], changed=2), manifest)
    assert found.difference is not None
    assert found.difference.startswith("step 3 has (merged steps, epoch, samples, samples so far) [2, 0,")


def test_a_run_that_has_not_begun_proves_nothing_about_another_one(manifest: Manifest) -> None:
    begun, not_begun = run(manifest, rows(manifest, 3)), run(manifest, [])
    assert (
        certify(begun, manifest, against=not_begun).difference
        == "run has no committed step, so nothing can be compared with it"
    )
    # `undula compare` shows such a run beside the others.
    found = agreement(begun, not_begun)
    assert found.holds
    assert found.not_proved == ["that the steps are as in run: that run has no committed step"]


def test_an_unfinished_run_is_certified_up_to_its_last_step(manifest: Manifest) -> None:
    found = certify(run(manifest, rows(manifest, 3)), manifest, against=run(manifest, rows(manifest)))
    assert found.holds
    assert any("7 steps that the run has not committed" in text for text in found.not_proved)
    assert any("the last 7 steps are as in run" in text for text in found.not_proved)
    assert any("no epoch is complete yet" in text for text in found.not_proved)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda steps: steps[:4] + steps[5:], "step 4 is missing from the ledger"),
        (lambda steps: [steps[0], steps[0], *steps[1:]], "step 1 is missing from the ledger or is in it twice"),
        (lambda steps: [replace(steps[0], samples=13), *steps[1:]], "step 0 has (merged steps, epoch, samples, samples so far)"),
        (lambda steps: [*steps[:9], replace(steps[9], sample_digest=5)], "step 9 did not consume the samples of the plan"),
        (lambda steps: [*steps, replace(steps[9], step=10)], "step 10 is in the ledger, but the plan ends before that step"),
        (lambda steps: [], "no step has been committed"),
    ],
)  # fmt: skip
def test_the_first_difference_from_the_plan_is_named(manifest: Manifest, change, sentence: str) -> None:
    assert sentence in str(certify(run(manifest, change(rows(manifest))), manifest).difference)


def test_other_data_than_those_of_the_run_are_refused(manifest: Manifest, tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(ROWS) + 1})
    other = write_shards(Store(str(tmp_path)), [table], table.schema, ROWS, num_shards=1)
    assert "has changed since the run started" in str(certify(run(manifest, rows(manifest)), other).difference)


def test_replayed_steps_must_equal_the_committed_ones(manifest: Manifest) -> None:
    steps = rows(manifest)
    same = certify(run(manifest, steps, [replace(steps[4], loss=steps[4].loss * (1 + 1e-7))]), manifest)
    assert any("1 replayed step consumed the same samples, with losses within 1.0e-07" in text for text in same.proved)
    other = certify(run(manifest, steps, [replace(steps[4], sample_digest=7)]), manifest)
    assert other.difference == "step 4 consumed other samples than in its replay"


def test_deterministic_runs_must_have_the_same_bits_of_each_loss(manifest: Manifest) -> None:
    steps = rows(manifest)
    other = [*steps[:4], replace(steps[4], loss=steps[4].loss * (1 + 1e-12)), *steps[5:]]
    runs = [run(manifest, each) for each in (steps, other)]
    assert certify(runs[0], manifest, against=runs[1]).holds
    exact = [replace(each, job=replace(each.job, spec={**each.job.spec, "deterministic": True})) for each in runs]
    assert "step 4 has loss" in str(certify(exact[0], manifest, against=exact[1]).difference)


def with_other_weights(manifest: Manifest, *arithmetics: dict[str, str]) -> list[RecordedRun]:
    """Return two runs on CPUs whose weights differ after step 4, given the arithmetic of each."""
    steps = [replace(each, weights_digest=each.step) for each in rows(manifest)]
    other = [*steps[:4], replace(steps[4], weights_digest=99), *steps[5:]]
    starts = [StartEvent(2, 1, same_bits=True, arithmetic=each, step=0) for each in arithmetics]
    return [replace(run(manifest, each), events=(start,)) for each, start in zip((steps, other), starts, strict=True)]


def test_runs_that_promise_equal_bits_must_have_them(manifest: Manifest) -> None:
    arithmetic = {"the number of threads": "1"}
    one, other = with_other_weights(manifest, arithmetic, arithmetic)
    equal = ", although the losses of 10 steps are equal"
    difference = certify(one, manifest, against=other).difference
    assert difference == f"the weights after step 4 are not those of run{equal}"
    steps = [
        replace(each, weights_digest=each.step + (each.step > 3), loss=each.loss + (each.step > 5))
        for each in rows(manifest)
    ]
    later = replace(run(manifest, steps), events=other.events)
    assert certify(one, manifest, against=later).difference == difference.removesuffix(equal)
    assert certify(one, manifest, against=one).holds


def test_the_first_step_that_differs_is_named_whatever_differs_in_it(manifest: Manifest) -> None:
    one, other = with_other_weights(manifest, {}, {})
    steps = [replace(each, loss=each.loss + (each.step > 2)) for each in rows(manifest)]
    earlier = replace(run(manifest, steps), events=other.events)
    assert "step 3 has loss" in str(certify(one, manifest, against=earlier).difference)


def test_validations_of_runs_with_equal_bits_must_be_equal(manifest: Manifest) -> None:
    start = StartEvent(2, 1, same_bits=True, step=0)
    validated = [
        replace(run(manifest, rows(manifest)), events=(start, ValidationEvent(0.5, 8, {"f1": f1}, step=2)))
        for f1 in (0.25, 0.25 + 1e-9, math.nan)
    ]
    assert "1 validation as in run" in certify(validated[0], manifest, against=validated[0]).proved
    assert certify(validated[2], manifest, against=validated[2]).holds
    found = certify(validated[0], manifest, against=validated[1])
    assert "the validation after step 2 has f1 0.25, but run has 0.250000001" in str(found.difference)
    rounded = [replace(each, events=each.events[1:]) for each in validated]
    assert certify(rounded[0], manifest, against=rounded[1]).holds


def test_weights_may_differ_between_machines_that_compute_otherwise_which_is_said(manifest: Manifest) -> None:
    one, other = with_other_weights(manifest, {"the number of threads": "1"}, {"the number of threads": "2"})
    found = certify(one, manifest, against=other)
    assert found.holds
    cause = "allowed because the number of threads is 1 in run and 2 in run"
    assert any(cause in text for text in found.not_proved)


def test_a_run_whose_own_machines_differ_promises_no_bits(manifest: Manifest) -> None:
    one, other = with_other_weights(manifest, {}, {})
    mixed = replace(one, events=(*one.events, WarningEvent("mixed_machines", "the CPU is one", step=0)))
    found = certify(mixed, manifest, against=other)
    assert found.holds
    assert any("run does not promise equal bits" in text for text in found.not_proved)


def test_a_run_whose_settings_were_changed_is_not_that_of_one_script(manifest: Manifest) -> None:
    one, other = with_other_weights(manifest, {}, {})
    steps = rows(manifest)
    replayed = run(manifest, steps, [replace(steps[4], loss=steps[4].loss * 2)])
    change = WarningEvent("settings_taken", "betas of parameter group 0 was (0.9, 0.999) and is (0.5, 0.9)", step=4)
    assert not certify(replayed, manifest).holds
    changed = replace(replayed, events=(*one.events, change))
    found = certify(changed, manifest)
    assert found.holds
    assert "that the steps are those of one script: from step 4 on, betas of parameter group 0 was (0.9, 0.999)" in str(
        found.not_proved
    )
    assert "that 1 replayed step had the same result both times, perhaps with other settings" in found.not_proved
    against = certify(replace(one, events=(*one.events, change)), manifest, against=other)
    assert any("run does not promise equal bits" in text for text in against.not_proved)


def test_the_setting_is_named_by_which_runs_have_other_plans(manifest: Manifest) -> None:
    one = run(manifest, rows(manifest))
    spec = {**one.job.spec, "plan": {**one.job.spec["plan"], "virtual_workers": 6}}
    other = replace(one, job=replace(one.job, plan_digest="other", spec=spec))
    difference = str(certify(one, manifest, against=other).difference)
    assert "another plan or other data (plan.virtual_workers is 6 there, and 4 here)" in difference


def test_weights_of_other_runs_may_differ_in_rounding_which_is_said(manifest: Manifest) -> None:
    steps = [replace(each, weights_digest=each.step) for each in rows(manifest)]
    other = [*steps[:4], replace(steps[4], weights_digest=99), *steps[5:]]
    runs = [run(manifest, each) for each in (steps, other)]
    found = certify(runs[0], manifest, against=runs[1])
    assert found.holds
    assert any("bit for bit: they differ after step 4 at the latest" in text for text in found.not_proved)
    assert any("bit for bit, according to" in text for text in certify(runs[0], manifest, against=runs[0]).proved)


@pytest.mark.parametrize(
    ("rule", "apart", "holds"), [("surge", 1e-7, True), ("surge", 1e-3, False), ("sqrt", 1e-7, False)]
)
def test_a_measured_learning_rate_only_needs_to_be_close(
    manifest: Manifest, rule: str, apart: float, holds: bool
) -> None:
    steps = rows(manifest)
    other = [steps[0], replace(steps[1], lr=steps[1].lr * (1 + apart)), *steps[2:]]
    runs = [run(manifest, each) for each in (steps, other)]
    ruled = [
        replace(each, job=replace(each.job, spec={**each.job.spec, "schedule": {"batch_rule": rule}})) for each in runs
    ]
    found = certify(ruled[0], manifest, against=ruled[1])
    assert found.holds == holds
    assert holds or "step 1 has lr 0.1" in str(found.difference)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"loss": 0.5 * (1 + 3e-5)}, "step 1 has loss 0.5, but run has 0.500015: a relative difference of 3.0e-05, more than 1e-05"),
        ({"loss": float("nan")}, "step 1 has loss 0.5, but run has nan"),
        ({"lr": 0.2}, "step 1 has lr 0.1, but run has 0.2"),
    ],
)  # fmt: skip
def test_two_runs_that_differ_are_distinguished(manifest: Manifest, changed: dict, sentence: str) -> None:
    steps = rows(manifest)
    other = [steps[0], replace(steps[1], **changed), *steps[2:]]
    assert sentence in str(certify(run(manifest, steps), manifest, against=run(manifest, other)).difference)
