"""Tests of the job that stands for a model by its size: what is counted of it is what its shape says."""

from collections.abc import Sequence

import pytest

from undula.config.job import load_spec
from undula.driver.gpt_job import Config, train
from undula.driver.plan_model import GPT_JOB, ModelSize, model_job
from undula.driver.preflight import examine
from undula.driver.record import job_of
from undula.errors import SpecError
from undula.parallel.spec import ActivationsSpec
from undula.plan.plan import Plan
from undula.train.dry_run.count import count
from undula.train.dry_run.counting import Setting

SMALL = ModelSize(
    10e6,
    "adamw",
    layers=None,
    width=None,
    context=128,
    vocabulary=1000,
    global_batch=None,
    steps=None,
    tokens=None,
)


def size_with(**changes: object) -> ModelSize:
    return ModelSize(**{**SMALL.__dict__, **changes})  # type: ignore[arg-type]


def plan_of(size: ModelSize, workers: Sequence[int] = (1, 4)) -> Plan:
    loaded = load_spec(GPT_JOB, model_job(size, workers).overrides, Config)
    return Plan(loaded.spec.plan, loaded.config.sequences)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_parameters_states_and_flops_are_those_of_the_shape(optimizer: str) -> None:
    made = model_job(size_with(optimizer=optimizer), [1, 4])
    loaded = load_spec(GPT_JOB, made.overrides, Config)
    job = job_of(loaded, "", script_data=examine(train, loaded, None).script_data)
    setting = Setting("bf16", ActivationsSpec(), 3)
    counted = count(train, job, [setting])
    shape, state, passes = made.shape, counted.state, counted.passes[setting]
    assert counted.is_fake
    assert state.parameters == shape.parameters == pytest.approx(10e6, rel=0.03)
    assert state.gradient_bytes == state.parameter_bytes == 4 * shape.parameters
    moments = {"adamw": 2, "sgd": 1}[optimizer]
    assert state.optimizer_bytes == pytest.approx(4 * moments * shape.parameters, rel=1e-4)
    tokens = 3 * shape.context
    products = 6 * (12 * shape.layers * shape.width**2 + shape.vocabulary * shape.width) * tokens
    # Attention has two products of context x context x width, and five in the backward pass, which computes one of them again.
    attention = 2 * (2 + 5) * shape.layers * shape.context * shape.width * tokens
    assert passes.work.flops == products + attention
    assert passes.work.flops == pytest.approx(6 * shape.parameters * tokens, rel=0.15)


def test_the_run_is_as_long_as_asked_for() -> None:
    usual = plan_of(SMALL)
    assert usual.spec.virtual_workers == 4
    assert usual.spec.global_batch == 4096, "GPT-3 125M takes 2^19 tokens per step"
    parameters = model_job(SMALL, [1]).shape.parameters
    assert usual.total_steps == round(20 * parameters / 2**19)
    assert plan_of(size_with(steps=7, global_batch=8)).total_steps == 7
    assert plan_of(size_with(tokens=1e6, global_batch=100)).total_steps == 78


def test_what_was_taken_is_said_with_its_source() -> None:
    shape, length = model_job(SMALL, [1]).sentences
    assert shape == (
        "A GPT with 10.08 M parameters: 5 layers, width 400, 5 heads, context 128, vocabulary 1,000, adamw; layers as GPT-3 125M (Brown et "
        "al. 2020), parameters = 12 x layers x width^2 + embeddings (Kaplan et al. 2020)."
    )
    assert "a batch as GPT-3 125M has it (Brown et al. 2020), 20 tokens per parameter (Hoffmann et al. 2022)" in length
    given = model_job(size_with(layers=5, width=384, steps=7, global_batch=8), [1]).sentences
    assert given == (
        "A GPT with 9.306 M parameters: 5 layers, width 384, 6 heads, context 128, vocabulary 1,000, adamw.",
        "8 sequences per step, 7 steps, 7.168 k tokens.",
    )


def test_impossible_runs_are_refused() -> None:
    with pytest.raises(SpecError, match="--optimizer adamax is not one of sgd, adam, adamw, lars, lamb"):
        model_job(size_with(optimizer="adamax"), [1])
    with pytest.raises(SpecError, match="--steps and --tokens both say how long the run is"):
        model_job(size_with(steps=7, tokens=1e9), [1])
    with pytest.raises(
        SpecError, match="--global-batch 6 cannot be divided among 4 workers; give a multiple of 4, such as 8"
    ):
        model_job(size_with(global_batch=6), [4])
