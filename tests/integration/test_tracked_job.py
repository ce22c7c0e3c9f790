"""Tests of real jobs with trackers: one of the user's own, which needs nothing installed, and MLflow and W&B where they are."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from jobs_kit import PLAN, Jobs
from mlflow_server import mlflow_server
from trackers_kit import assert_on_tensorboard, on_tensorboard

from undula.state.events import TrackerEvent
from undula.state.ledger import events_of

SCRIPT = """
import json
from pathlib import Path

import torch
import undula
from undula.driver import trackers

trackers.END_LIMIT_S = 2.0

class FileTracker:
    name = "file"

    def __init__(self, folder):
        self.folder = Path(folder)

    def lines(self):
        return [path.read_text() for path in sorted(self.folder.glob("step-*"))]

    def open(self, run):
        if (self.folder / "down").exists():
            raise ConnectionRefusedError("the folder is away")
        self.write("run", [run.id, run.parameters["plan.max_steps"]])
        return max((int(path.name[5:]) for path in self.folder.glob("step-*")), default=None)

    def send(self, steps):
        for step in steps:
            with (self.folder / f"step-{step.step:05d}").open("x") as file:  # fails if a step comes twice
                json.dump(dict(step.values), file)

    def describe(self, tags):
        self.write("tags", dict(tags))

    def close(self, state):
        self.write("state", state)

    def write(self, name, content):
        (self.folder / name).write_text(json.dumps(content))

def train(run):
    model = run.model(torch.nn.Embedding(256, 256))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    for step in run.steps(validate=lambda batch: model(batch["text"].long()).mean()):
        for batch in step.batches():
            text = batch["text"].long()
            step.backward(torch.nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()))
        step.log(double=2.0 * step.index)
        step.update()

folder = Path(__file__).parent / "tracked"
undula.main(train, trackers=[FileTracker(folder)] if folder.exists() else [])
"""


def with_script(jobs: Jobs, tmp_path: Path) -> Jobs:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    script.with_suffix(".yaml").write_text("name: script\ndata: {train: somewhere}\n")
    return replace(jobs, script=script, settings=(*PLAN, "plan.max_steps=12", "validation.every_steps=6"))


def test_a_tracker_of_the_user_gets_each_step_once_and_what_it_missed_when_the_job_is_submitted_again(
    jobs: Jobs, tmp_path: Path
) -> None:
    folder = tmp_path / "tracked"
    folder.mkdir()
    (folder / "down").touch()
    ours = with_script(jobs, tmp_path)
    done = ours.run("tracked", *jobs.workers(2))
    assert done.status == 0, done.err
    assert [event.tracker for event in events_of(done.ledger.events, TrackerEvent)] == ["file"]
    assert "The tracker file is out of reach, and training continues." in done.out
    assert "the tracker file lacks the run's newest steps, which could not be sent (ConnectionRefusedError" in done.out
    assert not list(folder.glob("step-*"))

    (folder / "down").unlink()
    again = ours.run("tracked", *jobs.workers(2))
    assert again.status == 0, again.err
    assert "is finished, so there is nothing to do" in again.out
    assert again.ledger.steps.equals(done.ledger.steps)
    steps = {int(path.name[5:]): json.loads(path.read_text()) for path in folder.glob("step-*")}
    assert sorted(steps) == list(range(13))  # number 0 is the validation before the first step
    assert [steps[step]["loss/train"] for step in range(1, 13)] == done.column("loss")
    assert [steps[step]["logged/double"] for step in range(1, 13)] == [2.0 * index for index in range(12)]
    assert [step for step in steps if "loss/validation" in steps[step]] == pytest.approx([0, 6, 12])
    assert json.loads((folder / "state").read_text()) == "finished"
    tags = json.loads((folder / "tags").read_text())
    assert (tags["job.workers.max"], tags["undula.events.start"], tags["undula.events.end"]) == ("2", "1", "1")
    assert json.loads((folder / "run").read_text())[1] == "12"
    assert_on_tensorboard(done.store)
    for name in ("loss/validation", "logged/double"):
        values = {step: steps[step][name] for step in sorted(steps) if name in steps[step]}
        assert dict(on_tensorboard(done.store, name)) == pytest.approx(values, rel=1e-6)


def test_a_job_is_one_run_of_mlflow_and_one_of_wandb(jobs: Jobs, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from undula.telemetry.trackers.wandb import history_steps

    with mlflow_server(tmp_path) as server:
        trackers = (f"trackers.mlflow.uri={server.url}", "trackers.wandb.mode=offline")
        done = with_script(jobs, tmp_path).run("tracked", *jobs.workers(1), *trackers)
        assert done.status == 0, done.err
        assert "could not be sent" not in done.out
        run = server.only_run()
        assert (run.info.run_name, run.info.status) == ("tracked", "FINISHED")
        assert run.data.params["plan.max_steps"] == "12"
        assert server.history("loss/train") == list(enumerate(done.column("loss"), 1))
        assert server.history("undula.step") == [(step, float(step)) for step in range(13)]
    (file,) = Path(done.store.path("trackers")).glob("wandb/offline-run-*/*.wandb")
    assert history_steps(file) == list(range(13))
