"""Tests of the command `undula chaos`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from alone import train_alone
from small_text import ENDLESS, MODEL, PLAN, write_text

from undula.state.events import ResizeEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store

JOB = Path(__file__).parents[2] / "jobs" / "language_model.yaml"
pytestmark = pytest.mark.timeout(900)


def chaos(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "undula.cli", "chaos", str(JOB), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "200"})


@pytest.mark.nightly
def test_a_job_is_replayed_under_a_trace_and_certified(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [1, 2, 2, 2, 1]}))
    data = (f"data.train={text}/train", "data.validation=null", f"runs={tmp_path}/runs", "name=traced")
    settings = (
        *data,
        *MODEL,
        *PLAN,
        *ENDLESS,
        "schedule.decay=constant",
        "config.model.width=128",
        "workers.grow=always",
    )
    done = chaos("--trace", str(trace), "--speedup", "30", "--notice", "5", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 faults," in done.stdout
    assert " 0 of them lost and repeated" in done.stdout
    assert "of an ideal job that resizes in no time" in done.stdout
    assert "certificate: holds" in done.stdout
    ledger = read_ledger(Store(f"{tmp_path}/runs/traced-chaos"))
    resizes = events_of(ledger.events, ResizeEvent)
    assert {(1, 2), (2, 1)} <= {(resize.before, resize.after) for resize in resizes}
    assert "(raylet)" not in done.stdout
    assert re.search(r"^chaos: drain node \(\w{8}\) deadline 5$", done.stdout, re.MULTILINE)
    assert re.search(r"^ +\d+\.\d\d s +\d+  add node \(\w{8}\)$", done.stdout, re.MULTILINE)
    steps = ledger.steps.num_rows
    alone = train_alone(
        [sys.executable, str(JOB.with_suffix(".py")), *settings, "name=alone", f"plan.max_steps={steps}"]
    )
    for column in ("loss", "grad_norm", "weights_digest"):
        assert (
            ledger.steps[column].to_pylist()[: steps - 1] == read_ledger(alone).steps[column].to_pylist()[: steps - 1]
        )


def test_an_invalid_schedule_is_refused_before_a_cluster_starts(tmp_path: Path) -> None:
    faults = tmp_path / "faults.txt"
    faults.write_text("at step 4: explode\n")
    done = chaos("--faults", str(faults))
    assert done.returncode == 2
    assert "faults.txt:1: 'at step 4: explode'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert chaos().returncode == 2
