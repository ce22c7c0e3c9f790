"""Tests of a study with its job before anything starts: mistakes are refused at once, and finished trials are not repeated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_text import write_text

from undula.cli.main import main
from undula.driver import submission
from undula.errors import ManifestError, RunError, SpecError, StorageError
from undula.state.directory import JOB_FILE
from undula.study.conduct import conduct
from undula.study.job import Study
from undula.study.load import load_study
from undula.study.records import TRIALS, read_spec, write_outcome
from undula.study.search import wanted
from undula.study.trials import Measurement, State, TrialRecord

JOB = {"schedule": {"warmup_samples": 64}, "plan": {"global_batch": 8, "max_steps": 20}}

StudyOf = Callable[..., Study]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def study(tmp_path: Path, text: str) -> StudyOf:
    """Return a function that makes a study with the given keys."""

    def made(**keys: Any) -> Study:
        data = {"train": f"{text}/train", "validation": f"{text}/validation"}
        (tmp_path / "job.yaml").write_text(json.dumps({"name": "job", "data": data, "runs": str(tmp_path), **JOB}))
        (tmp_path / "job.py").touch()
        values = {"name": "rates", "job": "job.yaml", "batches": [8, 16], "base_lrs": [0.1, 0.2], **keys}
        lines = [f"{key}: {json.dumps(value)}" for key, value in values.items()]
        (tmp_path / "study.yaml").write_text("\n".join(lines))
        return Study(load_study(tmp_path / "study.yaml"))

    return made


def begin(study: Study) -> None:
    """Write the records of a study, as if its trials had started."""
    study.begin()
    for trial in wanted(study.spec, {}):
        store, curve = study.store / TRIALS / trial.name, (Measurement(0, 0, 3.0), Measurement(160, 20, 1.0))
        store.write(JOB_FILE, json.dumps({"spec": study.job(trial).tree()}).encode())
        write_outcome(store, TrialRecord(trial, "complete", trial.base_lr, curve), False)


def status_of(*arguments: str) -> object:
    """Return the exit status of `undula study`."""
    with pytest.raises(SystemExit) as ended:
        main(["study", *arguments])
    return ended.value.code


def check(study: Study) -> None:
    study.check(wanted(study.spec, {}))


def test_the_job_provides_values_that_the_study_does_not_set(study: StudyOf) -> None:
    made = study()
    assert (made.spec.samples, made.spec.warmups) == (160, (64,))
    check(made)


def test_a_job_whose_script_gives_the_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: job\n")
    (tmp_path / "study.yaml").write_text(
        "{name: rates, job: job.yaml, batches: [8, 16], base_lrs: [0.1], metric: training_loss}"
    )
    with pytest.raises(
        SpecError, match=r"job\.yaml has no data\.train or data\.mix, which a study needs to plan its trials"
    ):
        Study(load_study(tmp_path / "study.yaml"))


def test_all_trials_have_the_gpus_of_the_resolved_job(study: StudyOf) -> None:
    made = study()
    made.base = made.base.with_workers(made.base.spec.workers.on_cluster(has_gpus=True))
    (trial, *_) = wanted(made.spec, {})
    assert made.job(trial).spec.workers.gpus == 1
    made.begin()
    assert json.loads(made.store.read("study.json"))["job"]["workers"]["gpus"] == 1


def test_a_study_hides_its_secrets_and_does_not_continue_with_others(study: StudyOf) -> None:
    made = study(overrides={"config.api_key": "hunter2"})
    begin(made)
    assert b"hunter2" not in b"".join(made.store.read(entry.name) for entry in made.store.list())
    check(study(overrides={"config.api_key": "hunter2"}))
    with pytest.raises(RunError, match=r"with config\.api_key \"\(hidden, digest \w+\)\", but it is \"\(hidden"):
        check(study(overrides={"config.api_key": "hunter3"}))


def test_a_warmup_that_is_longer_than_a_trial_is_refused_with_its_origin(study: StudyOf) -> None:
    with pytest.raises(SpecError, match=r"study\.yaml:5: own-none-b8-lr0\.1-w999-s0 has a warmup of 999 samples"):
        check(study(warmups=[999]))
    with pytest.raises(SpecError, match=r"study\.yaml:2: .*job\.yaml: .* a warmup of 64 samples .* set warmups"):
        check(study(samples=32))


def test_a_trial_that_its_job_refuses_is_named(study: StudyOf) -> None:
    overrides = {"gradient.noise_every_steps": 8, "plan.micro_batch": 4, "plan.virtual_workers": 1}
    with pytest.raises(SpecError, match=r"a step has one; .*\(in the trial own-none-b4-lr0\.1-w64-s0\)"):
        check(study(batches=[8, 4], overrides=overrides))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"samples": 320}, r"study\.yaml:5: .*/rates was started with samples 160, but it is 320 now; restore it"),
        ({"measurements": 40}, r"study\.yaml:5: .* was started with measurements 20, but it is 40 now"),
        ({"batches": [16, 8]}, r"study\.yaml:3: .*/rates was started with batches \[8\], but it is \[16\] now"),
        ({"rules": ["linear", "none"]}, r"study\.yaml:5: .* was started with rules \[\"none\"\], but it is \[\"linear\"\] now"),
        ({"metric": "training_loss"}, r"study\.yaml:5: .* was started with metric \"validation_loss\""),
        ({"overrides": {"plan.micro_batch": 2}}, r"has trained own-none-b8-lr0\.1-w64-s0 with plan\.micro_batch null, but it is 2"),
    ],
)  # fmt: skip
def test_a_started_study_cannot_change(study: StudyOf, keys: dict[str, Any], sentence: str) -> None:
    begin(study())
    with pytest.raises(RunError, match=sentence):
        check(study(**keys))
    other = study(**keys)
    other.check(wanted(other.spec, {}), fresh=True)


def test_the_config_of_the_job_cannot_change(study: StudyOf) -> None:
    begin(made := study(overrides={"config.model": {"width": 4}}))
    changed = study(overrides={"config.model": {"width": 8}})
    for knows_defaults in (True, False):
        with pytest.raises(RunError, match=r"with config\.model\.width 4, but it is 8 now"):
            changed.check(wanted(changed.spec, {}), knows_defaults=knows_defaults)
    trial = wanted(made.spec, {})[0]
    tree = made.job(trial).tree()
    tree["config"]["model"]["depth"] = 2  # the default of the script, which only the driver knows
    made.store.write(f"{TRIALS}/{trial.name}/{JOB_FILE}", json.dumps({"spec": tree}).encode())
    made.check([trial], knows_defaults=False)
    with pytest.raises(RunError, match=r"config\.model\.depth"):
        made.check([trial])


def test_a_rung_beyond_the_end_is_refused(study: StudyOf) -> None:
    with pytest.raises(
        SpecError, match=r"study\.yaml:6: first_rung is 999, but a trial has only 160 samples; lower first_rung"
    ):
        check(study(scheduler="asha", first_rung=999))


@pytest.mark.parametrize("price", ["-5", "nan", "inf", "much"])
def test_an_invalid_price_is_refused(price: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("report", "rates", "--worker-hour", price) == 2
    assert "undula: Invalid value for '--worker-hour': " in capsys.readouterr().err


def test_the_directory_of_a_run_is_refused_for_a_study(study: StudyOf) -> None:
    made = study()
    made.store.write(JOB_FILE, b"{}")
    with pytest.raises(RunError, match="is the directory of a run; give the study another name"):
        check(made)


def test_a_refused_study_deletes_nothing(study: StudyOf, tmp_path: Path) -> None:
    begin(made := study())
    study(warmups=[9999])
    before = made.store.list()
    with pytest.raises(SpecError, match="has a warmup of"):
        conduct(lambda run: None, None, tmp_path / "study.yaml", (), fresh=True)
    assert [entry.name for entry in made.store.list()] == [*sorted({*(each.name for each in before), ".lock"})]
    check(study(batches=[8, 16, 32], base_lrs=[0.1, 0.2, 0.4], seeds=[0, 1], target=2.0))


def test_data_that_cannot_be_read_are_reported_with_their_key(study: StudyOf) -> None:
    with pytest.raises((StorageError, ManifestError), match=r"study\.yaml:5: data\.train: "):
        study(overrides={"data.train": "/none/such"})


def test_a_study_whose_trials_have_ended_is_reported_without_a_cluster(
    study: StudyOf, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    begin(made := study())
    study(target=2.0)
    assert status_of(str(tmp_path / "study.yaml")) == 0
    out = capsys.readouterr().out
    assert "all 4 trials have ended; start over with --fresh" in out
    assert out.splitlines()[-1] == f"study directory: {made.url}"
    assert "starting" not in out
    assert "target 2" in Path(made.store.path("report/index.html")).read_text()
    assert read_spec(made.store).target == 2.0


@pytest.mark.parametrize("is_fresh", [True, False])
def test_an_unfinished_study_needs_a_cluster(
    study: StudyOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fresh: bool
) -> None:
    begin(made := study())
    failed = wanted(made.spec, {})[0]
    state: State = "complete" if is_fresh else "failed"
    write_outcome(made.store / TRIALS / failed.name, TrialRecord(failed, state, 0.1), False)
    asked: list[str] = []
    monkeypatch.setattr(submission, "run_submission", lambda *arguments: asked.append("submitted") or 0)
    assert status_of(str(tmp_path / "study.yaml"), *(["--fresh"] if is_fresh else [])) == 0
    assert asked == ["submitted"]


def test_a_study_for_a_running_cluster_is_not_checked_here(
    study: StudyOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://elsewhere:8265")
    monkeypatch.setattr(submission, "run_submission", lambda *arguments: 0)
    assert status_of(str(tmp_path / "study.yaml"), "overrides.data.train=/on/the/cluster") == 0
