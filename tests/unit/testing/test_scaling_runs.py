"""Tests of what `undula bench scaling` runs: the order of sizes, the overrides of each run, refusals, and programs that fail."""

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from report_rows import step_of

from undula.cli.bench import scaling
from undula.config.job import load_spec
from undula.errors import ClusterError, RunError, SpecError
from undula.report.render.scaling_text import load_warning
from undula.state.ledger import LedgerWriter
from undula.state.processes import is_alive
from undula.storage import Store
from undula.testing.scaling_runs import NEVER, Bench, OtherSteps, Trained, read_steps, turns

JOB = Path(__file__).parents[3] / "jobs" / "language_model.yaml"


def bench_of(overrides: Sequence[str] = (), **values: Any) -> Bench:
    overrides = ("runs=/runs", *overrides)
    given = {"sizes": (1, 2), "rounds": 2, "steps": 30, "is_weak": False, "limit_s": 60.0, **values}
    return Bench(JOB, load_spec(JOB, overrides), overrides, (), **given)


def test_the_order_of_sizes_turns_from_round_to_round() -> None:
    assert turns((1, 2, 4), 4) == [[1, 2, 4], [2, 4, 1], [4, 1, 2], [1, 2, 4]]


def test_each_run_trains_the_same_plan_on_a_fixed_number_of_workers() -> None:
    bench = bench_of(["checkpoint.keep_best={metric: loss, mode: min}", "stop={metric: loss, mode: min, patience: 3}"])
    for workers in (1, 2):
        spec = load_spec(JOB, [*bench.overrides, *bench.own_overrides(workers, 2)]).spec
        assert spec.run_url == f"/runs/language-model-bench/{workers}-workers-2"
        assert (spec.workers.min, spec.workers.max) == (workers, workers)
        assert (spec.plan.global_batch, spec.plan.virtual_workers, spec.plan.max_steps) == (32, 4, 30)
        assert (spec.checkpoint.every_steps, spec.data.validation, spec.stop) == (NEVER, None, None)


def test_with_weak_the_plan_grows_with_the_workers() -> None:
    bench = bench_of(is_weak=True, sizes=(1, 8))
    spec = load_spec(JOB, [*bench.overrides, *bench.own_overrides(8)]).spec
    assert (spec.plan.global_batch, spec.plan.virtual_workers, bench.global_batch(8)) == (256, 32, 256)
    bench.check()


@pytest.mark.parametrize(
    ("overrides", "values", "sentence"),
    [
        ((), {"sizes": (1, 8)}, "--workers has 8, more than plan.virtual_workers (4)"),
        (("plan.batch=elastic",), {}, "command line: plan.batch is elastic"),
        ((), {"against": "train --steps {steps} --out {out}"}, "--against lacks {workers}"),
        (("workers.resources={TPU: 1}",), {}, "workers.resources.TPU is 1, but this machine has no TPU"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_first_run(
    overrides: Sequence[str], values: Any, sentence: str
) -> None:
    with pytest.raises(SpecError) as refused:
        bench_of(overrides, **values).check()
    assert sentence in str(refused.value)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RunError("the run on 2 workers failed")])
def test_what_was_measured_before_a_stop_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    store = Store(str(tmp_path / "run"))
    store.write("job.json", b'{"name": "run", "total_steps": 3}')
    with closing(LedgerWriter(store, 1)) as ledger:
        for step in range(3):
            ledger.step(step_of(step, world_size=1, loss=1.0, sample_digest=step, time=1.0 + step))

    def trainings(self: Bench, show: Any) -> Iterator[Trained]:
        yield Trained(1, 1, 30.0, store)
        raise stop

    monkeypatch.setattr(Bench, "trainings", trainings)
    done = CliRunner().invoke(
        scaling, [str(JOB), "--rounds", "1", "--steps", "2", "--warmup", "1", "--runs", str(tmp_path)]
    )
    assert "round 1 of 1, 1 worker: " in done.output
    assert "30 s in all, about 30 s left" in done.output
    assert "stopped after 1 of 2 trainings, of which this is the report:" in done.output
    assert re.search(r"workers +samples/s", done.output)
    assert done.exit_code == 1
    assert isinstance(stop, KeyboardInterrupt) or done.exception is stop


def test_a_busy_machine_is_named() -> None:
    assert load_warning(0.3, 2) is None
    assert str(load_warning(12.04, 2)).startswith(
        "The load of this machine is 12.0 on 2 cores before the first training"
    )


def other(command: str, **values: Any) -> Bench:
    return bench_of(against=command, sizes=(2,), rounds=1, **values)


def test_the_other_program_gets_its_numbers_and_writes_its_steps(tmp_path: Path) -> None:
    code = f"import json; json.dump(dict(seconds=[0.5] * {{steps}}, samples={{workers}}), open('{tmp_path}/' 'x', 'w'))"
    bench = other(f'{sys.executable} -c "{code}"; cp {tmp_path}/x {{out}}; echo {{global_batch}} > {tmp_path}/batch')
    assert bench._train_other(2, 1, lambda line: None) == OtherSteps((0.5,) * 30, 2.0)
    assert (tmp_path / "batch").read_text() == "32\n"


def test_a_program_that_fails_or_does_not_end_is_named_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="on 2 workers in round 1 of 1 failed with status 3: a reason"):
        other("echo a reason; exit 3")._train_other(2, 1, lambda line: None)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"did not end within 1 s.*waiting"):
        other(f"setsid sleep 60 & echo $! > {tmp_path}/pid; echo waiting; wait", limit_s=1.0)._train_other(
            2, 1, lambda line: None
        )
    assert time.monotonic() - began < 30
    pid = int((tmp_path / "pid").read_text())
    left = [process for process in psutil.process_iter() if process.pid == pid and is_alive(process)]
    assert not left, "what a shell has started ends with it"


@pytest.mark.parametrize(
    "content",
    ["", "[1.0, 2.0]", '{"seconds": [], "samples": 4}', '{"seconds": [0.1, 0], "samples": 4}', '{"samples": 4}'],
)
def test_steps_in_another_form_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "steps.json").write_text(content)
    with pytest.raises(RunError, match=re.escape('has not written {"seconds"')):
        read_steps(tmp_path / "steps.json", "the command")


def test_steps_of_the_other_program_are_read(tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text(json.dumps({"seconds": [0.5, 1], "samples": 4}))
    assert read_steps(tmp_path / "steps.json", "the command") == OtherSteps((0.5, 1.0), 4.0)
