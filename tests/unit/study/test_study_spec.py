"""Tests of a study's YAML: values are read correctly, and mistakes are refused in one sentence with the place, the key and the fix."""

from collections.abc import Callable
from pathlib import Path

import pytest

from undula.config.job import load_spec
from undula.errors import SpecError
from undula.study.load import LoadedStudy, load_study

STUDY = """\
name: study
job: job.yaml
batches: [32, 64, 128]
"""
RATES = "base_lrs: [1e-3, 3e-3]\n"

Load = Callable[..., LoadedStudy]
Refused = Callable[..., str]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return a function that loads STUDY, next to a job, with additional YAML at its end."""
    (tmp_path / "job.yaml").write_text(
        "name: job\ndata: {train: /data, validation: /held-out}\nplan: {virtual_workers: 4}\n"
    )

    def loaded(more: str = RATES, *overrides: str, text: str = STUDY) -> LoadedStudy:
        (tmp_path / "study.yaml").write_text(text + more)
        return load_study(tmp_path / "study.yaml", overrides)

    return loaded


@pytest.fixture
def refused(load: Load, tmp_path: Path) -> Refused:
    """Return a function that returns the message with which YAML is refused, without the folder."""

    def sentence(more: str, *overrides: str, text: str = STUDY) -> str:
        with pytest.raises(SpecError) as caught:
            load(more, *overrides, text=text)
        assert "\n" not in str(caught.value)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return sentence


def test_a_study_is_loaded_with_its_job(load: Load) -> None:
    study = load(RATES, "seeds=[1, 2]", "target=2.4")
    assert (study.spec.batches, study.spec.rates, study.spec.seeds) == ((32, 64, 128), (1e-3, 3e-3), (1, 2))
    assert (study.spec.metric, study.spec.target) == ("validation_loss", 2.4)
    assert study.job.spec.name == "job"
    assert study.where(["seeds"]) == "command line"
    assert study.where(["batches"]).endswith("study.yaml:3")


def test_a_range_of_rates_has_equal_ratios_and_both_ends(load: Load) -> None:
    rates = load("base_lr_range: {low: 1e-4, high: 1e-1, points: 4}\n").spec.rates
    assert rates == pytest.approx((1e-4, 1e-3, 1e-2, 1e-1))
    assert rates[-1] == 1e-1


def test_rules_are_combined_with_their_optimizers_only(load: Load) -> None:
    spec = load(RATES + "rules: [sqrt, adascale, adam_sde]\noptimizers: [sgd, adamw]\n").spec
    assert spec.pairs() == (("sgd", "sqrt"), ("sgd", "adascale"), ("adamw", "sqrt"), ("adamw", "adam_sde"))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("", "study.yaml: base_lrs is empty; give either base_lrs or base_lr_range"),
        ("base_lrs: []\n", "study.yaml:4: base_lrs is empty; give either base_lrs or base_lr_range"),
        (
            RATES + "base_lr_range: {low: 1e-4, high: 1}\n",
            "study.yaml:4: base_lrs and base_lr_range are both given; give either base_lrs or base_lr_range",
        ),
        (
            "base_lr_range: {low: 1, high: 0.1}\n",
            "study.yaml:4: base_lr_range.low is 1, not below high (0.1); exchange",
        ),
        (
            "base_lr_range: {low: 1, high: 1.001}\n",
            "study.yaml:4: base_lr_range.low is 1 and high is 1.001, which is one learning rate; give base_lrs",
        ),
        ("base_lr_range: {low: 1, high: 2, points: 2}\n", "study.yaml:4: base_lr_range.points is 2: it should be "),
        (RATES + "seeds: []\n", "study.yaml:5: seeds is empty, which leaves nothing to train; give one value or more"),
        (RATES + "rules: []\n", "study.yaml:5: rules is empty, which leaves nothing to train; give one value or more"),
        (RATES + "seeds: [1, 2, 1]\n", "study.yaml:5: seeds has 1 twice; keep one"),
        (
            RATES + "rules: [adascale]\noptimizers: [adamw]\n",
            "study.yaml:5: rules has adascale, which is for sgd and not for adamw; remove it, or give another optimizer",
        ),
        (
            RATES + "optimizers: [sgd, adamw]\nrules: [adascale]\n",
            "study.yaml:5: optimizers has adamw, for which none of the rules is; remove it, or add a rule",
        ),
        ("base_lrs: [0.1, 0.10000001]\n", "study.yaml:4: base_lrs has 0.1 twice; keep one"),
        (
            RATES + "overrides: {plan: {seed: 1}, plan.micro_batch: 2}\n",
            "study.yaml:5: overrides has plan.seed, which the study sets from seeds; remove it",
        ),
        (
            RATES + "overrides: {plan: {micro_batch: 1}, plan.micro_batch: 2}\n",
            "study.yaml:5: overrides has plan.micro_batch twice",
        ),
        (RATES + "rules: [square]\n", 'study.yaml:5: rules.0 is "square": it should be '),
        (
            RATES + "first_rung: 512\n",
            "study.yaml:5: first_rung=512 cannot be combined with scheduler=none; give scheduler: asha, or remove",
        ),
        (RATES + "seeds: 3\n", "study.yaml:5: seeds is 3: it should be a list"),
        (RATES + "search: random\n", "study.yaml: trials is missing; search=random needs a number of trials"),
        (
            RATES + "trials: 8\n",
            "study.yaml:5: trials=8 cannot be combined with search=grid, which trains everything; remove",
        ),
        (
            RATES + "search: adaptive\ntrials: 8\n",
            "study.yaml:4: base_lrs is a list, and search=adaptive needs a range to search in; give base_lr_range",
        ),
        (RATES + "bathces: [1]\n", "study.yaml:5: unknown key bathces: did you mean batches?"),
        (RATES + "target: low\n", 'study.yaml:5: target is "low": it should be a valid number'),
        (RATES + "max_concurrent: 0\n", "study.yaml:5: max_concurrent is 0: it should be greater than 0"),
    ],
)
def test_each_mistake_is_refused_in_one_sentence(refused: Refused, more: str, sentence: str) -> None:
    assert refused(more).startswith(sentence)


def test_a_study_of_one_batch_needs_no_rule(refused: Refused, load: Load) -> None:
    assert refused(RATES + "rules: [sqrt]\n", "batches=[64]") == (
        "command line: batches has 64 only, and the rule sqrt needs another batch to scale to; "
        "give two batches or more, or remove rules"
    )
    assert load(RATES, "batches=[64]").spec.batches == (64,)


def test_a_batch_that_virtual_workers_do_not_divide_is_refused(refused: Refused) -> None:
    assert refused(RATES, "batches=[64, 66]") == (
        "command line: batches has 66, which plan.virtual_workers (4) of job.yaml does not divide; use multiples of it"
    )


def test_overrides_are_checked_as_values_of_the_job(load: Load, refused: Refused) -> None:
    assert (
        load(RATES + "overrides: {plan: {virtual_workers: 8}, schedule.decay: constant}\n").job.spec.schedule.decay
        == "constant"
    )
    sentence = refused(RATES + "overrides: {plan.virtual_wokers: 8}\n")
    assert sentence.startswith("study.yaml:5: unknown key plan.virtual_wokers: did you mean virtual_workers?")
    below = "overrides:\n  data.validation: /other\n  plan:\n    virtual_wokers: 8\n"
    assert refused(RATES + below).startswith("study.yaml:8: unknown key plan.virtual_wokers")
    assert refused(RATES, "overrides.plan.virtual_wokers=8").startswith("command line: unknown key plan.virtual_wokers")


def test_the_command_line_takes_precedence_over_overrides_in_any_notation(load: Load) -> None:
    for written in ("{plan: {micro_batch: 1}}", "{plan.micro_batch: 1}"):
        study = load(RATES + f"overrides: {written}\n", "overrides.plan.micro_batch=2")
        assert study.job.spec.plan.micro_batch == 2
        assert study.job.origins["plan.micro_batch"] == "command line"


def test_values_that_the_study_sets_cannot_be_overridden(load: Load, refused: Refused) -> None:
    assert refused(RATES + "overrides: {plan.global_batch: 8}\n") == (
        "study.yaml:5: overrides has plan.global_batch, which the study sets from batches; remove it"
    )
    assert "from keep_models" in refused(RATES + "overrides: {checkpoint.keep: 3}\n")
    assert "from warmups" in refused(RATES + "warmups: [8]\noverrides: {schedule.warmup_steps: 3}\n")
    assert "from optimizers" in refused(RATES + "optimizers: [sgd]\noverrides: {config.optimizer.name: lamb}\n")
    assert "from samples" in refused(RATES + "samples: 64\noverrides: {plan: {epochs: 2}}\n")
    assert load(RATES + "overrides: {plan: {epochs: 2}}\n").job.spec.plan.epochs == 2


def test_a_key_of_the_job_is_refused_with_its_place(refused: Refused) -> None:
    assert refused(RATES, "runs=/runs") == (
        "command line: unknown key runs: it is a key of the job; write overrides.runs, or put it below overrides"
    )
    text = "name: job\ndata: {train: /data}\n"
    assert refused("", text=text).startswith(
        "study.yaml:2: unknown key data: this is a job's YAML; start it with `undula run`"
    )
    text = "name: job\nconfig: {}\ndata: {train: /data}\n"
    assert refused("", text=text).startswith(
        "study.yaml:2: unknown key config: this is a job's YAML; start it with `undula run`"
    )


def test_a_study_is_refused_as_a_job(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("name: study\nsamples: 8\n" + STUDY.partition("\n")[2])
    with pytest.raises(SpecError, match="unknown key samples: this is a study's YAML; start it with `undula study`"):
        load_spec(tmp_path / "study.yaml")


def test_an_invalid_value_of_a_trial_is_reported_at_its_place_in_the_study(load: Load) -> None:
    study = load(RATES)
    with pytest.raises(SpecError, match=r"study\.yaml:4: schedule\.base_lr is -1\.0"):
        study.job_with({"schedule.base_lr": -1.0})


def test_a_job_without_the_metric_is_refused(refused: Refused, load: Load) -> None:
    without = "overrides: {data.validation: null}\n"
    assert refused(RATES + without).endswith("has no data.validation; add it, or set metric: training_loss")
    assert load(RATES + without + "metric: training_loss\n").job.spec.data.validation is None
    assert "plan.batch of job.yaml is elastic" in refused(RATES + "overrides: {plan.batch: elastic}\n")
    assert "job.yaml has stop, but a study compares trials that have consumed the same number of samples" in refused(
        RATES + "overrides: {stop: {patience: 3}, data.validation: /other}\n"
    )
    assert "cannot be combined with engine=horovod of job.yaml" in refused(
        RATES + "packed: 2\noverrides: {engine: horovod}\n"
    )


def test_a_missing_job_is_named(refused: Refused) -> None:
    assert refused(RATES, "job=jobs/none.yaml") == (
        'command line: job is "jobs/none.yaml", but jobs/none.yaml does not exist; '
        "set the path of a job's YAML, relative to that of the study"
    )


def test_a_file_that_is_not_a_study_is_refused(refused: Refused) -> None:
    assert (
        refused("", text="") == "study.yaml is empty: a study's YAML is a mapping with the keys name, job, batches, ..."
    )
    assert refused("", text="name: study\njob: job.yaml\n") == "study.yaml: batches is missing; add it"


def test_packed_trials_without_shared_resources_are_refused(refused: Refused) -> None:
    assert "workers in job.yaml has no cpus, gpus or resources" in refused(
        RATES + "packed: 2\noverrides: {workers.cpus: 0}\n"
    )


def test_packed_trials_share_a_single_gpu_or_get_whole_ones(load: Load, refused: Refused) -> None:
    assert (
        "packed=2 divides the 3 GPUs of a worker in job.yaml into shares of 1.5, but Ray can only divide a single GPU"
        in refused(RATES + "packed: 2\noverrides: {workers.gpus: 3}\n")
    )
    for gpus in (0.5, 1, 4):
        assert load(RATES + f"packed: 2\noverrides: {{workers.gpus: {gpus}}}\n").job.spec.workers.gpus == gpus
