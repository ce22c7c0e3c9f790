"""Tests that bad input is refused in one sentence with the place and the fix, before any worker starts and without a cluster."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from forked import run_script
from jobs_kit import LANGUAGE_MODEL, SMALL, Finished, Jobs, job_json

from undula.storage import open_store

NO_CLUSTER = "127.0.0.1:1"
"""Address on which nothing listens. A job that is not refused before it connects to Ray fails with another message."""


@pytest.fixture
def own_text(text: str, tmp_path: Path) -> Path:
    """Copy of the data that a test can damage. The copy has the same modification times, so the manifest is valid."""
    return Path(shutil.copytree(text, tmp_path / "text"))


def refusal(
    data: Path | str, runs: Path | str, *overrides: str, env: dict[str, str] | None = None, status: int = 2
) -> str:
    """Return the message with which the main job refuses these settings."""
    arguments = ("name=bad", f"runs={runs}", f"data.train={data}/train", f"data.validation={data}/validation")
    with tempfile.TemporaryDirectory() as folder:
        more = {"RAY_ADDRESS": NO_CLUSTER, **(env or {})}
        done = run_script(Path(folder), LANGUAGE_MODEL, (*arguments, *SMALL, *overrides), more)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("undula: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("plan.gobal_batch=3", "command line: unknown key plan.gobal_batch: did you mean global_batch?"),
        ("config.model.width=wide", 'command line: config.model.width is "wide": it should be a valid integer'),
        ("data.train=null", "command line: data.validation is set, but data.train and data.mix are missing; set one"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_accepted(
    text: str, tmp_path: Path, override: str, sentence: str
) -> None:
    assert sentence in refusal(text, tmp_path, override)


def test_missing_data_of_both_kinds_are_named(text: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: bad\nplan: {seed: 1}\n")
    done = subprocess.run(
        [sys.executable, str(LANGUAGE_MODEL), "--config", str(job)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "data.train and data.mix are missing, and the script does not call run.dataset()" in done.stderr


def test_missing_data_is_named_with_the_fix(tmp_path: Path) -> None:
    sentence = refusal(tmp_path / "nothing", tmp_path)
    assert (
        f"command line: data.train: there is no folder {tmp_path}/nothing/train; correct the path, or create"
        in sentence
    )


def test_a_deleted_shard_is_named(own_text: Path, tmp_path: Path) -> None:
    (own_text / "train" / "part-00001.parquet").unlink()
    assert "train/part-00001.parquet is in the manifest but does not exist" in refusal(own_text, tmp_path)


def test_a_truncated_shard_is_named(own_text: Path, tmp_path: Path) -> None:
    shard = own_text / "train" / "part-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert "train/part-00000.parquet has changed since it was indexed" in refusal(own_text, tmp_path)


def test_a_manifest_of_another_schema_is_refused(own_text: Path, tmp_path: Path) -> None:
    assert "data.columns names 'label', which" in refusal(own_text, tmp_path, "data.columns=[label]")
    manifest = own_text / "train" / "_manifest.json"
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**body, "format": 99}))
    assert "has format 99, but this version of Undula reads format 1" in refusal(own_text, tmp_path)


def test_more_virtual_workers_than_samples_are_refused(text: str, tmp_path: Path) -> None:
    sentence = refusal(text, tmp_path, "plan.virtual_workers=1000000", "plan.global_batch=1000000")
    assert "plan.virtual_workers is 1000000, more than the" in sentence


def test_an_unwritable_run_directory_is_named(text: str, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    sentence = refusal(text, blocked)
    assert "command line: runs: the run directory is not writable" in sentence
    assert str(blocked) in sentence


def test_the_directory_of_a_study_is_refused_as_a_run(text: str, tmp_path: Path) -> None:
    open_store(f"{tmp_path}/bad").write("study.json", b"{}")
    assert refusal(text, tmp_path).endswith("/bad is a study's directory; give the run another name")


def test_missing_s3_credentials_are_named(text: str, tmp_path: Path) -> None:
    bare = {key: "" for key in os.environ if key.startswith("AWS_")}
    bare |= {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}
    sentence = refusal(text, "s3://bucket/runs", env=bare)
    assert "no AWS credentials were found for s3://bucket/runs" in sentence
    assert "AWS_ACCESS_KEY_ID" in sentence


def test_a_checkpoint_of_another_model_is_refused(session_jobs: Jobs, on_one_rank: Finished, tmp_path: Path) -> None:
    same = (f"name={job_json(on_one_rank.store)['name']}", *session_jobs.past_an_epoch())
    sentence = refusal(session_jobs.text, session_jobs.runs, *same, "config.model.width=64")
    assert "config.model.width is 64, but" in sentence
    assert "was started with 32; restore it, set another name, or start over with --fresh" in sentence

    # The same settings, and a script whose model has changed.
    script = tmp_path / "changed" / "language_model.py"
    shutil.copytree(LANGUAGE_MODEL.parent, script.parent)
    model = script.parent / "gpt.py"
    model.write_text(model.read_text().replace("4 * config.width", "3 * config.width"))
    done = replace(session_jobs, script=script).run("another", *same)
    assert done.status == 2
    assert "is from another model: its 'blocks.0.up.weight' has shape (128, 32)" in done.err
    assert on_one_rank.store.exists("job.json")


def test_options_and_overrides_can_be_mixed(text: str, tmp_path: Path) -> None:
    job = LANGUAGE_MODEL.with_suffix(".yaml")
    command = [sys.executable, "-m", "undula.cli", "run", str(job), "plan.seed=5", "--print", "name=mixed"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "seed: 5" in shown
    assert "warmup" in shown
    relative = [*command[:4], os.path.relpath(job, tmp_path), *command[5:]]
    assert (
        subprocess.run(relative, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.count("seed: 5") == 1
    )
    wrong = subprocess.run([*command, "config.model.width=wide"], capture_output=True, text=True)
    assert wrong.returncode == 2, "the script's own settings are checked too"
    assert wrong.stderr == 'undula: command line: config.model.width is "wide": it should be a valid integer\n'
    script = [sys.executable, str(LANGUAGE_MODEL), "plan.seed=5", "--print", "name=mixed"]
    assert "seed: 5" in subprocess.run(script, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (("--script=nowhere.py",), 2, "there is no script nowhere.py"),
        (("--address=127.0.0.1:8265",), 2, "the address of the job API is '127.0.0.1:8265', which is not a URL"),
        (("--address=http://127.0.0.1:1",), 3, "the cluster at http://127.0.0.1:1 cannot be reached"),
    ],
)
def test_a_job_that_cannot_be_submitted_ends_with_one_sentence(
    arguments: tuple[str, ...], status: int, sentence: str
) -> None:
    command = [sys.executable, "-m", "undula.cli", "run", str(LANGUAGE_MODEL.with_suffix(".yaml")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == status
    assert f"undula: {sentence}" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreachable_cluster_ends_the_job_with_one_sentence(text: str, tmp_path: Path) -> None:
    assert "cannot connect to the Ray cluster 127.0.0.1:1" in refusal(text, tmp_path, status=3)
