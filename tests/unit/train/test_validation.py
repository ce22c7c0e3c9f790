"""Tests of validation with a loss that draws random numbers: it depends on the weights alone, and it leaves the training as it is."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feature_scripts import drawn, named_means, with_random_numbers
from numbers_job import cpu_run, numbers_job, run_batches
from pytorch_optimizer import ScheduleFreeSGD
from torch import Tensor, nn
from torch.utils.data import DataLoader

from undula.data.spec import ValidationSpec
from undula.data.stored.rows import Batch
from undula.errors import UsageError
from undula.plan.schedule import ScheduleSpec
from undula.state.events import ValidationEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store
from undula.train.job import Job

pytestmark = pytest.mark.usefixtures("process_group")


def validating(folder: Path) -> Job:
    job = numbers_job(folder, micro_batch=2, global_batch=20, max_steps=3)
    job = replace(job, deterministic=True, schedule=replace(job.schedule, base_lr=1e-30))
    return replace(job, data=replace(job.data, validation=job.data.train), validation=ValidationSpec(every_steps=1))


def drawn_between_steps(job: Job, validates: bool) -> list[float]:
    """Train without changing the weights, and return numbers that the script draws between steps."""
    run = cpu_run(job)
    model = run.model(nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    numbers = []
    for step in run.steps(validate=partial(with_random_numbers, model) if validates else None):
        numbers.append(float(drawn()))
        for batch in step.batches():
            step.backward(with_random_numbers(model, batch))
        step.update()
    return numbers


def test_validations_draw_the_same_numbers_and_change_none_that_follow(tmp_path: Path) -> None:
    job = validating(tmp_path)
    without = replace(job, run_url=f"{tmp_path}/without")
    assert drawn_between_steps(job, True) == drawn_between_steps(without, False)
    losses = [event.loss for event in events_of(read_ledger(Store(job.run_url)).events, ValidationEvent)]
    assert len(losses) == 4
    assert len(set(losses)) == 1


def test_named_means_are_those_of_all_samples(tmp_path: Path) -> None:
    job = validating(tmp_path)
    run = cpu_run(job)
    model = run.model(nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    next(run.steps(validate=partial(named_means, model)))
    (event,) = events_of(read_ledger(Store(job.run_url)).events, ValidationEvent)
    assert (event.means["x"], event.means["samples"]) == (23.5, pytest.approx(88 / 48))
    assert event.means.keys() == {"loss", "x", "samples"}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: {"accuracy": x.mean()}, r"returned \['accuracy'\] without 'loss'; return the mean loss"),
        (lambda x: {"loss": x.mean(), "all": x}, r"returned 'all' as a tensor of shape \(2,\); return its mean"),
        (lambda x: {"loss": 1.0, f"from {x[0]:.0f}": 1.0}, r"returned \['from 2', 'loss'\] after .* the same names"),
    ],
)
def test_a_validation_function_that_returns_no_means_is_refused(tmp_path: Path, returned: Any, message: str) -> None:
    run = cpu_run(validating(tmp_path))
    model = run.model(nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    with pytest.raises(UsageError, match=message):
        next(run.steps(validate=lambda batch: returned(batch["x"])))


def test_a_frozen_layer_stays_in_eval_mode_after_a_validation(tmp_path: Path) -> None:
    """After a resume there may be no validation before the first step, so the layer would otherwise depend on the run's history."""
    run = cpu_run(replace(validating(tmp_path), plan=numbers_job(tmp_path).plan))
    model = run.model(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)))
    model[0].eval()  # type: ignore[operator]
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    modes = []

    def loss(batch: Batch) -> Tensor:
        modes.append(tuple(each.training for each in model.modules()))
        x = batch["x"]
        assert isinstance(x, Tensor)
        loss: Tensor = model(x[:, None]).square().mean()
        return loss

    steps = run.steps(validate=loss)
    step = next(steps)
    assert set(modes) == {(False, False, False)}
    modes.clear()
    for batch in step.batches():
        step.backward(loss(batch))
    assert set(modes) == {(True, False, True)}
    steps.close()


def test_a_validation_has_the_weights_for_evaluation_of_an_optimizer_without_a_schedule(tmp_path: Path) -> None:
    """The script may also change between them by itself, as the documentation of such optimizers asks for."""
    run = cpu_run(replace(validating(tmp_path), schedule=ScheduleSpec(base_lr=0.1)))
    model = run.model(nn.Linear(1, 1))
    optimizer = run.optimizer(ScheduleFreeSGD(model.parameters(), lr=run.base_lr))
    modes = []

    def loss(batch: Batch) -> Tensor:
        x = batch["x"]
        assert isinstance(x, Tensor)
        modes.append(optimizer.param_groups[0]["train_mode"])
        optimizer.eval()  # type: ignore[attr-defined]
        return model(x[:, None] / 48).square().mean()  # type: ignore[no-any-return]

    done = 0
    for step in run.steps(validate=loss):
        optimizer.train()  # type: ignore[attr-defined]
        run_batches(step, model)
        step.update()
        done += 1
        assert optimizer.param_groups[0]["train_mode"]
    assert done == run.plan.total_steps
    assert not any(modes)


def test_the_map_of_a_validation_is_held_to_the_columns_of_the_validation_datas_first_row(tmp_path: Path) -> None:
    run = cpu_run(validating(tmp_path))
    model = run.model(nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    run.map(
        lambda sample, rng: {"train": sample["x"]},
        validation=lambda sample, rng: {"x": sample["x"] if sample["x"] < 40 else np.float64(sample["x"])},
    )
    with pytest.raises(UsageError, match=r"'x' as float64\[\] for sample 40 of .*, but as float32\[\] for the first"):
        next(run.steps(validate=lambda batch: model(torch.as_tensor(batch["x"])[:, None]).mean()))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"validate": DataLoader([1.0])},
            "run.steps(validate=...) got an object of type DataLoader, and needs a function that returns the mean loss of a batch; give "
            "the data themselves to run.dataset(..., validation=...), or set data.validation",
        ),
        ({"after_step": 100}, "run.steps(after_step=...) got an object of type int, and needs a function"),
    ],
)
@pytest.mark.parametrize("has_data", [True, False])
def test_what_cannot_be_called_is_refused_at_the_first_step(
    arguments: Any, sentence: str, has_data: bool, tmp_path: Path
) -> None:
    run = cpu_run(validating(tmp_path) if has_data else numbers_job(tmp_path, micro_batch=2, global_batch=20))
    model = run.model(nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    with pytest.raises(UsageError) as error:
        next(iter(run.steps(**arguments)))
    assert str(error.value).startswith(sentence)
