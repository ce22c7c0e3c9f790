"""Tests of telemetry: Prometheus, the live view, and output and errors of the user's code."""

import json
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs_kit import LANGUAGE_MODEL, PLAN, Finished, Jobs, job_json, relative_difference

from undula.report.data.run_record import read_run
from undula.state.events import ValidationEvent
from undula.state.ledger import events_of
from undula.state.processes import signal_group
from undula.storage import Store


def test_prometheus_can_scrape_the_metrics_of_a_run(jobs: Jobs, tmp_path: Path) -> None:
    process = with_script(jobs, tmp_path).start("watched", "plan.max_steps=1000", "config.pace_s=0.3")
    try:
        targets = Path(jobs.cluster.env["RAY_AUTH_TOKEN_PATH"]).parent / "prom_metrics_service_discovery.json"
        gauges = ("step", "loss", "learning_rate", "samples_per_second", "world_size")
        wanted = [f"ray_undula_{name}" for name in (*gauges, "committed_steps_total")]
        deadline = time.monotonic() + 120
        lines: dict[str, str] = {}
        while not all(name in lines for name in wanted):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, sorted(lines)
            page = scrape(targets)
            lines = {line.partition("{")[0]: line for line in page.splitlines() if 'run="watched"' in line}
            time.sleep(0.5)  # paces the scrapes
        assert 0 < float(lines["ray_undula_loss"].split()[-1]) < 7
        assert float(lines["ray_undula_committed_steps_total"].split()[-1]) > 0
        refuse_unconventional_metrics(page)
        assert read_run(Store(jobs.runs + "/watched")).has_driver is True
    finally:
        signal_group(process, signal.SIGTERM)
        process.communicate()


@pytest.mark.nightly
def test_gauges_stay_while_a_step_takes_longer_than_ray_keeps_them(jobs: Jobs, tmp_path: Path) -> None:
    """Ray's agent drops a gauge that was not set for 20 s."""
    process = with_script(jobs, tmp_path).start("slow", "plan.max_steps=1000", "config.pace_s=600")
    try:
        targets = Path(jobs.cluster.env["RAY_AUTH_TOKEN_PATH"]).parent / "prom_metrics_service_discovery.json"
        deadline = time.monotonic() + 120
        while "ray_undula_loss{" not in scrape(targets):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.5)  # paces the scrapes
        end = time.monotonic() + 45
        while time.monotonic() < end:
            page = scrape(targets)
            assert all(f"ray_undula_{name}{{" in page for name in ("loss", "step", "world_size"))
            time.sleep(1)  # paces the scrapes
    finally:
        signal_group(process, signal.SIGTERM)
        process.communicate()


def refuse_unconventional_metrics(page: str) -> None:
    """Check the metrics of this project on a page with promtool, which Debian has in its package prometheus, if it is installed."""
    own = "".join(f"{line}\n" for line in page.splitlines() if re.match(r"(# (HELP|TYPE) )?ray_undula_", line))
    kinds = dict(re.findall(r"# TYPE (\S+) (\w+)", own))
    assert {kind for name, kind in kinds.items() if name.endswith("_total")} == {"counter"}
    assert {kind for name, kind in kinds.items() if not name.endswith("_total")} == {"gauge"}
    if promtool := shutil.which("promtool"):
        checked = subprocess.run([promtool, "check", "metrics"], input=own, capture_output=True, text=True)
        # Ray adds labels such as SessionName to every metric, which promtool would rather have in snake_case.
        problems = [line for line in (checked.stdout + checked.stderr).splitlines() if "camelCase" not in line]
        assert problems == []


def scrape(targets: Path) -> str:
    """Return all metrics of the cluster."""
    if not targets.exists():
        return ""
    pages = []
    for target in json.loads(targets.read_text())[0]["targets"]:
        try:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=5) as response:
                pages.append(response.read().decode())
        except urllib.error.URLError:
            continue
    return "\n".join(pages)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    from undula.data.prepare.corpora import digits

    out = str(tmp_path_factory.mktemp("digits"))
    digits().write(out, num_shards=2, row_group_bytes=8192)
    return out


@pytest.mark.nightly
def test_batch_normalization_and_logged_values_are_the_same_with_each_engine_and_world_size(
    session_jobs: Jobs, images: str
) -> None:
    """The run has one epoch with a short last step. Validation losses are compared as well."""
    settings = (
        "plan.global_batch=96",
        "plan.virtual_workers=3",
        "plan.epochs=1",
        "schedule.base_lr=0.002",
        "config.model.width=4",
    )
    script = LANGUAGE_MODEL.with_name("image_classifier.py")
    jobs = Jobs(session_jobs.cluster, images, session_jobs.runs, script, settings)
    alone = jobs.alone("images-1")
    assert alone.column("step_samples")[-1] == job_json(alone.store)["train_rows"] % 96 != 0
    assert sum(alone.column("step_samples")) == job_json(alone.store)["train_rows"]
    losses = validation_losses(alone)
    others = [jobs.alone("images-2-torch", world_size=2)]
    if find_spec("horovod"):
        others.append(jobs.run("images-2-horovod", "engine=horovod", *jobs.workers(2)))
    for together in others:
        assert together.status == 0, together.err
        assert together.column("sample_digest") == alone.column("sample_digest")
        # At larger rates, rounding errors grow without bound within these steps.
        assert relative_difference(together.column("loss"), alone.column("loss")) < 1e-5
        assert validation_losses(together) == pytest.approx(losses, rel=1e-5)
    accuracies = [json.loads(text)["accuracy"] for text in alone.column("logged")]
    assert accuracies
    assert all(0 <= accuracy <= 1 for accuracy in accuracies)


def validation_losses(done: Finished) -> list[float]:
    return [event.loss for event in events_of(done.ledger.events, ValidationEvent)]


SCRIPT = """
import logging
import time

import torch
import undula

def train(run):
    model = run.model(torch.nn.Embedding(256, 256))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    print("hello from the loop")
    logging.basicConfig(format="%(name)s %(levelname)s: %(message)s", level=logging.INFO)
    logging.getLogger("script").info("a line of the script")
    logging.getLogger("script").warning("a warning of the script")
    for step in run.steps():
        for batch in step.batches():
            text = batch["text"].long()
            step.backward(torch.nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()))
        if run.config.get("forget") and step.index == 2:
            continue
        step.update()
        time.sleep(run.config.get("pace_s", 0))

undula.main(train)
"""


def with_script(jobs: Jobs, tmp_path: Path) -> Jobs:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    script.with_suffix(".yaml").write_text("name: script\ndata: {train: somewhere}\n")
    return replace(jobs, script=script, settings=(*PLAN, "plan.max_steps=5"))


def test_output_and_errors_of_the_training_loop_are_shown_and_an_error_fails_the_job(
    jobs: Jobs, tmp_path: Path
) -> None:
    done = with_script(jobs, tmp_path).run("mistake", "config.forget=true", *jobs.workers(2))
    assert done.status == 2
    assert "rank 0: hello from the loop" in done.out
    assert "rank 1: hello from the loop" in done.out
    assert "rank 1: script INFO: a line of the script" in done.out
    assert "rank 1: script WARNING: a warning of the script" in done.out
    assert "pid=" not in done.out + done.err
    assert re.search(r"undula: step 2 ended without step.update\(\); .* \(script.py:\d+\)$", done.err.strip())
    assert "Traceback" not in done.err
