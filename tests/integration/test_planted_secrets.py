"""Test with real jobs that secrets reach the script, and appear in no file of the run, no log, no list of jobs, and no output."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs_kit import Jobs
from numbers_job import write_numbers

SCRIPT = """
import hashlib, os
import torch, undula

NAMES = ("API_TOKEN", "PLANTED_FILE", "PLANTED_ENV")

def fingerprint(run):
    values = [run.config["apiKey"], run.config["service"]["clientSecret"], *(os.environ[name] for name in NAMES)]
    return hashlib.sha256(" ".join(values).encode()).hexdigest()

def in_map(sample, rng):
    assert all(name in os.environ for name in NAMES)
    return sample

def train(run: undula.Run) -> None:
    run.map(in_map)
    model = run.model(torch.nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    for step in run.steps():
        for batch in step.batches():
            step.backward(model(batch["x"][:, None] / 48).square().mean())
        print("fingerprint", fingerprint(run), run.config["eos_token"])
        step.update()

if __name__ == "__main__":
    print("driver", *(hashlib.sha256(os.environ[name].encode()).hexdigest() for name in NAMES))
    undula.main(train)
"""
LIST_JOBS = "import sys; from ray.job_submission import JobSubmissionClient; print(JobSubmissionClient(sys.argv[1]).list_jobs())"
"""Program that prints the list of jobs. It is a process of its own, because Ray reads the token of a cluster once in a process."""
PLANTED = {
    "yaml": "planted-yaml-4711", "override": "planted-override-4712", "nested": "planted-nested-4713", "secret": "planted-secret-4714",
    "file": "planted-file-4715", "env": "planted-env-4716", "study": "planted-study-4717", "url": "planted-url-4718",
}  # fmt: skip
"""Secrets by where they are planted. None of them has a form that gives it away."""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write_numbers(tmp_path, 48)
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "secretive.py").write_text(SCRIPT)
    (tmp_path / "secrets.env").write_text(f"# for the job\nexport PLANTED_FILE='{PLANTED['file']}'\n")
    (folder / "secretive.yaml").write_text(
        f"name: secretive\nruns: {tmp_path}/runs\ndata: {{train: {tmp_path}/data}}\n"
        "plan: {global_batch: 12, virtual_workers: 2, epochs: 1}\nworkers: {min: 1, max: 1}\n"
        f"config: {{eos_token: shown-eos, apiKey: {PLANTED['yaml']}, tracking: 'https://me:{PLANTED['url']}@tracking', "
        "service: {clientSecret: none}}\n"
    )
    (folder / "study.yaml").write_text(
        f"name: studied\njob: secretive.yaml\nbatches: [12]\nbase_lrs: [0.1]\nmetric: training_loss\npacked: 1\nsamples: 48\n"
        f"overrides: {{config.apiKey: {PLANTED['study']}, schedule.warmup_samples: 0}}\n"
    )
    return folder


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("run", ()),
        pytest.param("run", ("data.head_mib=0",), marks=pytest.mark.nightly, id="read tasks"),
        pytest.param("study", (), marks=pytest.mark.nightly),
    ],
)
def test_planted_secrets_reach_the_script_and_appear_nowhere(
    kind: str, more: tuple[str, ...], job: Path, session_jobs: Jobs
) -> None:
    cluster = session_jobs.cluster
    prefix, file, key = ("", "secretive.yaml", "yaml") if kind == "run" else ("overrides.", "study.yaml", "study")
    overrides = [f"{prefix}config.service={{clientSecret: {PLANTED['nested']}}}"]
    if kind == "run":
        overrides, key = [*overrides, *more, f"config.apiKey={PLANTED['override']}"], "override"
    command = [
        *(str(Path(sys.executable).parent / "undula"), kind, str(job / file), *overrides, "--secret", "API_TOKEN"),
        *("--secret-file", str(job.parent / "secrets.env"), "--env", f"PLANTED_ENV={PLANTED['env']}"),
    ]
    env = {**os.environ, **cluster.env, "RAY_API_SERVER_ADDRESS": cluster.dashboard, "API_TOKEN": PLANTED["secret"]}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    out = done.stdout + done.stderr
    assert done.returncode == 0, out

    values = [PLANTED[name] for name in (key, "nested", "secret", "file", "env")]
    if kind == "run":  # a study shows its table instead of lines of its trials
        assert f"fingerprint {hashlib.sha256(' '.join(values).encode()).hexdigest()} shown-eos" in out
    assert " ".join(hashlib.sha256(value.encode()).hexdigest() for value in values[2:]) in out

    session = next(word for word in cluster.process.cmdline() if word.startswith("--temp-dir=")).partition("=")[2]
    texts = {"output": out.encode()}
    for folder in (job.parent / "runs", *Path(session).glob("session_2*/logs")):
        texts |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert any("job.json" in path for path in texts)
    assert any("gcs_server" in path for path in texts)
    assert not [
        (path, name) for path, text in texts.items() for name, value in PLANTED.items() if value.encode() in text
    ]
    listed = subprocess.run(
        [sys.executable, "-c", LIST_JOBS, cluster.dashboard],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert file in listed
    assert not [name for name, value in PLANTED.items() if value in listed]
