"""Tests of the trackers of a job: what is refused before a worker starts, and what trackers show of a run beside its steps."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from numbers_job import write_numbers
from outside import installed
from priced_run import write_priced_run
from torch import nn
from trackers_kit import KeptTracker
from waiting import wait_until

from undula.config.job import LoadedSpec, load_spec
from undula.driver import trackers
from undula.driver.preflight import prepare
from undula.driver.record import record_job
from undula.driver.trackers import Tracking, problem_of, send_rest, tags_of, tracked_run
from undula.errors import SpecError
from undula.state.directory import JOB_FILE, job_record
from undula.state.events import CheckpointEvent, CrashEvent, Event, StartEvent, TrackerEvent
from undula.state.ledger import EventWriter, read_ledger
from undula.storage import Store
from undula.study.load import load_study
from undula.telemetry.registry import SETTINGS
from undula.train.run import Run

SECRET = "planted-secret-4711"


def job(folder: Path, *overrides: str) -> LoadedSpec:
    file = folder / "job.yaml"
    if not file.exists():
        write_numbers(folder, 48)
        tree = {"name": "run", "runs": str(folder), "data": {"train": str(folder / "data")}}
        file.write_text(json.dumps({**tree, "config": {"api_key": SECRET, "width": 8}}))
    return load_spec(file, ["plan.global_batch=12", *overrides])


def train(run: Run) -> None:
    run.model(nn.Linear(2, 3))


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        prepare(job(folder, *overrides), train, fresh=False)
    return str(caught.value)


@pytest.mark.parametrize("library", ["mlflow", "wandb"])
def test_a_missing_extra_is_refused_with_the_command_that_installs_it(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (library, *(name for name in sys.modules if name.startswith(f"{library}."))):
        monkeypatch.setitem(sys.modules, module, None)
    said = refusal(tmp_path, f"trackers.{library}={{}}")
    assert said == f"command line: trackers.{library}: {library} is not installed; run pip install 'undula[{library}]'"


@pytest.mark.parametrize("override", ["trackers.wandb.project=text", "trackers.wandb={project: text}"])
def test_a_tracker_of_the_command_line_is_refused_with_that_origin(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert refusal(tmp_path, override).startswith("command line: trackers.wandb: wandb is not installed; ")


def test_a_key_of_a_tracker_has_its_own_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    job(tmp_path)
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({**json.loads(file.read_text()), "trackers": {"wandb": {"project": "text"}}}))
    assert refusal(tmp_path).startswith(f"{file}:1: trackers.wandb: mode is online, but ")
    assert refusal(tmp_path, "trackers.wandb.mode=online").startswith(
        "command line: trackers.wandb: mode is online, but "
    )


def test_unknown_keys_and_wrong_values_are_refused_by_name(tmp_path: Path) -> None:
    job(tmp_path)
    for override, words in (
        ("trackers.neptune={}", f"unknown key trackers.neptune: known keys: {', '.join(sorted(SETTINGS))}"),
        ("trackers.mlflow.url=x", "unknown key trackers.mlflow.url: did you mean uri?"),
        ("trackers.mlflow.uri=ftp://host", "trackers.mlflow.uri is"),
        ("trackers.wandb.folder=here", "trackers.wandb.folder is"),
        ("trackers.wandb.mode=dryrun", "trackers.wandb.mode is"),
    ):
        with pytest.raises(SpecError, match=words):
            job(tmp_path, override)


def test_a_study_refuses_trackers(tmp_path: Path) -> None:
    job(tmp_path)
    study = tmp_path / "study.yaml"
    body = {"name": "study", "job": "job.yaml", "batches": [12], "base_lrs": [0.1], "metric": "training_loss"}
    study.write_text(json.dumps({**body, "overrides": {"trackers": {"wandb": {"mode": "offline"}}}}))
    with pytest.raises(SpecError, match=r"job\.yaml has trackers, but a study does not send its trials to trackers"):
        load_study(study)
    study.write_text(json.dumps({**body, "overrides": {"trackers.mlflow": None, "trackers.wandb": None}}))
    load_study(study)


@pytest.fixture
def begun(tmp_path: Path) -> Store:
    """Directory of a run whose job was submitted."""
    prepared = prepare(job(tmp_path), train, fresh=False)
    assert [tracker.name for tracker in prepared.trackers] == ["TensorBoard"]  # which shows every run
    record_job(job(tmp_path), prepared.plan, prepared.store)
    return prepared.store


def test_settings_of_the_plan_are_parameters_and_those_that_may_change_are_tags_and_secrets_are_neither(
    begun: Store,
) -> None:
    record = job_record(begun)
    run = tracked_run(record, begun)
    assert (run.id, run.name, run.url, run.began) == (record["id"], "run", begun.url, record["began"])
    assert run.parameters["plan.global_batch"] == "12"
    assert run.parameters["config.width"] == "8"
    assert run.parameters["manifest_digest"] == str(record["manifest_digest"])
    tags = tags_of(record, begun, read_ledger(begun).events)
    assert tags["undula.plan_digest"] == str(record["plan_digest"])
    assert tags["job.workers.max"] == str(record["spec"]["workers"]["max"])
    assert not {key for key in tags if key.startswith(("job.plan", "job.config"))}
    assert SECRET not in repr((run, tags))
    assert run.parameters["config.api_key"].startswith("(hidden")


def test_events_are_counted_and_the_newest_messages_are_shown_without_secrets(begun: Store) -> None:
    writer = EventWriter(begun, "test")
    events: list[Event] = [CheckpointEvent(0.5, step=step, time=float(step)) for step in range(50)]
    events.append(StartEvent(2, 1, step=0, time=50.0))
    events.append(CrashEvent("failure", "RuntimeError: password=hunter22", time=51.0))
    for event in events:
        writer.event(event)
    tags = tags_of(job_record(begun), begun, read_ledger(begun).events)
    counts = {key: value for key, value in tags.items() if key.startswith("undula.events.")}
    assert counts == {"undula.events.checkpoint": "50", "undula.events.start": "1", "undula.events.crash": "1"}
    assert tags["undula.events"].splitlines() == [
        "step 0: Training started with 2 workers.",
        "Workers failed (RuntimeError: password=***); the run continues with a new group.",
    ]
    assert "undula.cost_usd" not in tags


def test_the_cost_of_a_run_is_a_tag_if_all_its_machines_have_prices(begun: Store, tmp_path: Path) -> None:
    record = job_record(begun)
    write_priced_run(begun)
    assert float(tags_of(record, begun, read_ledger(begun).events)["undula.cost_usd"]) > 0
    other = Store(str(tmp_path / "unpriced"))
    write_priced_run(other, other=("unheard-of", "spot"))
    assert "undula.cost_usd" not in tags_of(record, other, read_ledger(other).events)


def test_another_package_adds_tags(begun: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def team(store):\n    return {'team': 'vision', 'folder': store.url}\n"
    (tmp_path / "package").mkdir()
    installed(tmp_path / "package", "tags_of_a_team", source, "undula.tags", team="tags_of_a_team:team")
    monkeypatch.syspath_prepend(tmp_path / "package")
    tags = tags_of(job_record(begun), begun, read_ledger(begun).events)
    assert (tags["team"], tags["folder"]) == ("vision", begun.url)


def test_an_error_is_shown_in_one_line_and_without_secrets() -> None:
    assert problem_of(ConnectionError("refused\n  by host")) == "ConnectionError: refused by host"
    assert (
        problem_of(ValueError("https://me:hunter22@host does not answer"))
        == "ValueError: https://me:***@host does not answer"
    )
    assert problem_of(TimeoutError()) == "TimeoutError"


def test_an_outage_is_an_event_and_what_was_not_sent_is_said_at_the_end(
    begun: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "END_LIMIT_S", 0.1)
    tracker = KeptTracker(is_down=True)
    published: list[Event] = []
    record = begun.read(JOB_FILE)
    write_priced_run(begun)
    begun.write(JOB_FILE, record)
    with Tracking([tracker], begun, published.append) as tracking:
        wait_until(lambda: published)
    [event] = published
    assert isinstance(event, TrackerEvent)
    assert event.message == (
        "The tracker kept is out of reach, and training continues. It gets the steps that it lacks once it is back: "
        "ConnectionRefusedError: connection refused."
    )
    assert tracking.unsent == [
        "the tracker kept lacks the run's newest steps, which could not be sent (ConnectionRefusedError: connection refused); "
        "submit the job again to send them"
    ]

    tracker.is_down = False
    monkeypatch.setattr(trackers, "END_LIMIT_S", 60.0)
    assert send_rest([tracker], begun) == []
    assert tracker.numbers[-1] == read_ledger(begun).steps["step"][-1].as_py() + 1
    assert tracker.states == ["finished"]
