"""Tests of the figures of `undula bench scaling`: medians, efficiency and where it is lost, fits, and whether runs are the same."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from report_rows import ledger_of, step_of

from undula.errors import RunError
from undula.report.data.run_record import JobRecord, RecordedRun
from undula.report.data.sameness import sameness
from undula.report.data.scaling import CLASSES, Round, environment, is_oversubscribed, measured, scaling_of
from undula.report.render.scaling_text import sentences, throughput_table
from undula.state.events import GroupEvent, StartEvent
from undula.state.records import StepRow


def recorded(steps: Sequence[StepRow], *events: Any, spec: Any = None, plan: str = "p") -> RecordedRun:
    start = (StartEvent(2, 1, same_bits=True, step=0),) if not events else ()
    return RecordedRun(JobRecord("job", plan, spec or {}), ledger_of(steps), (*events, *start))


def steps_of(durations: Sequence[float], **values: Any) -> list[StepRow]:
    ends = [100.0 + sum(durations[: place + 1]) for place in range(len(durations))]
    return [step_of(place, time=end, **values) for place, end in enumerate(ends)]


def round_of(number: int, workers: int, rate: float, samples: float = 8.0, **shares: float) -> Round:
    """Return a round whose step consists of the given shares, and of computing."""
    step_s = samples / rate
    parts = {name: step_s * shares.get(name, 0.0) for name in CLASSES}
    return Round(number, workers, rate, samples, {**parts, "compute": step_s * (1 - sum(shares.values()))})


def test_a_round_leaves_warm_up_out_and_its_classes_add_up_to_a_step() -> None:
    parts = {"data_s": 0.1, "transfer_s": 0.1, "compute_s": 0.8, "communication_s": 0.5, "wait_s": 0.2, "other_s": 0.0}
    run = recorded(steps_of([9.0, 7.0, 2.0, 2.0, 2.0], **parts))
    found = measured(run, 2, 1, warmup=2)
    assert found.samples_per_s == pytest.approx(8 / 2.0)
    assert found.seconds == pytest.approx(
        {"compute": 0.8, "communication": 0.3, "waiting": 0.2, "data": 0.2, "boundary": 0.5}
    )


def test_one_slow_step_does_not_change_the_throughput() -> None:
    found = measured(recorded(steps_of([9.0, 2.0, 2.0, 20.0, 2.0, 2.0])), 2, 1, warmup=1)
    assert found.samples_per_s == pytest.approx(4.0)
    assert sum(found.seconds.values()) == pytest.approx(2.0)


def test_runs_that_lost_a_worker_or_are_too_short_are_refused() -> None:
    with pytest.raises(RunError, match="lost a worker"):
        measured(recorded(steps_of([1.0, 1.0, 1.0])), 3, 1, warmup=1)
    with pytest.raises(RunError, match="has 2 steps, and the first 2 do not count"):
        measured(recorded(steps_of([1.0, 1.0])), 2, 1, warmup=2)


def test_the_lost_efficiency_is_the_sum_of_its_classes() -> None:
    rounds = [
        *(round_of(number, 1, rate) for number, rate in enumerate((9.0, 10.0, 12.0), 1)),
        *(
            round_of(number, 2, rate, communication=0.15, boundary=0.05)
            for number, rate in enumerate((15.0, 16.0, 18.0), 1)
        ),
    ]
    one, two = scaling_of("job", False, 10, rounds, (), {}).sizes
    assert (one.throughput.median, one.throughput.low, one.throughput.high) == (10.0, 9.0, 12.0)
    assert (one.speedup, one.efficiency) == (1.0, 1.0)
    assert (two.speedup, two.efficiency) == pytest.approx((1.6, 0.8))
    assert two.lost["communication"] == pytest.approx(0.15)
    assert two.lost["boundary"] == pytest.approx(0.05)
    assert sum(two.lost.values()) == pytest.approx(0.2)
    assert sum(two.seconds.values()) == pytest.approx(8 / 16)


def test_a_smallest_size_of_several_workers_counts_as_ideal() -> None:
    rounds = [round_of(1, 2, 20.0), round_of(1, 4, 30.0)]
    two, four = scaling_of("job", False, 10, rounds, (), {}).sizes
    assert (two.speedup, four.speedup, four.efficiency) == (2.0, 3.0, 0.75)


def test_amdahls_fit_recovers_the_serial_share_and_says_which_classes_it_is() -> None:
    rates = {1: 10.0, 2: 10 / (0.2 + 0.8 / 2), 4: 10 / (0.2 + 0.8 / 4)}
    rounds = [
        round_of(number, workers, rate, communication=0.3 * (workers > 1), boundary=0.1 * (workers > 1))
        for workers, rate in rates.items()
        for number in (1, 2)
    ]
    fit = scaling_of("job", False, 10, rounds, (), {}).fit
    assert fit is not None
    assert (fit.law, fit.share.value) == ("Amdahl", pytest.approx(0.8, abs=1e-3))
    assert fit.one["value"] == pytest.approx(10.0, rel=1e-2)
    assert sum(fit.serial.values()) == pytest.approx(0.2, abs=1e-3)
    assert fit.serial["communication"] == pytest.approx(3 * fit.serial["boundary"])
    assert fit.speedup(4) == pytest.approx(2.5, rel=1e-2)


def test_gustafsons_fit_is_that_of_work_that_grows_with_the_workers() -> None:
    rounds = [
        round_of(number, workers, 10 * (0.1 + 0.9 * workers), samples=8.0 * workers)
        for workers in (1, 2, 4)
        for number in (1, 2)
    ]
    found = scaling_of("job", True, 10, rounds, (), {})
    assert found.fit is not None
    assert (found.fit.law, found.fit.share.value) == ("Gustafson", pytest.approx(0.9, abs=1e-3))
    assert found.sizes[-1].efficiency == pytest.approx(0.925)


def test_oversubscribed_sizes_take_no_part_in_the_fit() -> None:
    rounds = [round_of(number, workers, 10.0 * min(workers, 2)) for workers in (1, 2, 4) for number in (1, 2)]
    found = scaling_of("job", False, 10, rounds, (4,), {})
    assert [size.is_oversubscribed for size in found.sizes] == [False, False, True]
    assert found.fit is not None
    assert found.fit.share.value == 1.0
    alone = scaling_of("job", False, 10, rounds, (2, 4), {})
    assert alone.fit is None
    assert "at least two numbers of workers" in alone.no_fit
    once = scaling_of("job", False, 10, [each for each in rounds if each.number == 1], (4,), {})
    assert "at least 3 measurements" in once.no_fit


def test_the_other_training_is_compared_within_each_round() -> None:
    rounds = [round_of(number, 2, rate) for number, rate in enumerate((10.0, 20.0, 90.0), 1)]
    others = [Round(number, 2, rate, 8.0, {}) for number, rate in enumerate((20.0, 20.0, 20.0), 1)]
    (size,) = scaling_of("job", False, 10, rounds, (), {}, others).sizes
    assert size.baseline is not None
    assert (size.baseline.median, size.ratio) == (20.0, 1.0)


@pytest.mark.parametrize(
    ("cores", "nodes", "cpus", "expected"),
    [(2, "aa", 1.0, False), (2, "aaa", 1.0, True), (2, "aabb", 1.0, False), (2, "aa", 2.0, True), (1, "aa", 0.5, True)],
)
def test_sizes_above_the_cores_are_oversubscribed(cores: int, nodes: str, cpus: float, expected: bool) -> None:
    start = StartEvent(len(nodes), 1, arithmetic={"the CPU": "x"}, cores=cores, step=0)
    group = GroupEvent(tuple({"rank": rank, "node": node} for rank, node in enumerate(nodes)))
    run = recorded([], group, start, spec={"workers": {"cpus": cpus}})
    assert is_oversubscribed(run) == expected
    assert environment([run]) == {"cores": str(cores), "CPU": "x"}


def test_workers_on_gpus_do_not_need_a_core_each() -> None:
    start = StartEvent(4, 1, arithmetic={"the GPU": "H200"}, cores=2, step=0)
    assert not is_oversubscribed(recorded([], GroupEvent(({"node": "a"},) * 4), start))


@pytest.mark.parametrize("loss", [2.0, math.nan])
def test_runs_with_equal_bits_are_identical(loss: float) -> None:
    values = {"loss": loss, "weights_digest": 7, "grad_norm": 0.5}
    runs = [(workers, recorded(steps_of([1.0, 1.0], **values))) for workers in (1, 2, 2)]
    found = sameness(runs)
    assert found.identical
    assert found.sentence == (
        "The losses and gradient norms of 2 steps and 2 digests of the weights are equal bit for bit on 1 and 2 workers, in all 3 runs."
    )


def test_runs_whose_bits_may_not_differ_are_not_the_same() -> None:
    ours, other = (recorded(steps_of([1.0], weights_digest=digest)) for digest in (7, 8))
    found = sameness([(1, ours), (2, other)])
    assert not found.identical
    assert found.difference
    assert found.sentence == (
        "The runs are not the same training: the weights after step 0 are not those of job, although the losses of 1 step are equal (on 2 "
        "workers, compared with 1 worker)."
    )


def test_runs_that_promise_no_equal_bits_are_the_same_within_rounding() -> None:
    event = StartEvent(2, 1, step=0)
    ours, other = (recorded(steps_of([1.0], weights_digest=digest), event) for digest in (7, 8))
    found = sameness([(1, ours), (2, other)])
    assert (found.identical, found.difference) == (False, None)
    assert "within rounding; not proved: that the weights equal" in found.sentence


def test_what_was_expected_stands_beside_what_was_measured() -> None:
    rounds = [round_of(number, workers, 10.0 * workers) for workers in (1, 2) for number in (1, 2)]
    report = scaling_of("job", False, 60, rounds, (), {}, expected={1: 12.0, 2: 19.0})
    assert [size.expected for size in report.sizes] == [12.0, 19.0]
    head, rows = throughput_table(report)
    assert [row[head.index("expected")] for row in rows] == ["12.00", "19.00"]
    assert any(sentence.endswith("it is off by +20%, -5%.") for sentence in sentences(report, None, None))
    assert "expected" not in throughput_table(scaling_of("job", False, 60, rounds, (), {}))[0]
