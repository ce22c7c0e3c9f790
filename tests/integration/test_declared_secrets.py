"""Test with real jobs that a script may print, log and raise the secrets that its user has declared, and that no record shows them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs_kit import Jobs
from numbers_job import write_numbers

from undula.state.ledger import read_ledger
from undula.storage import Store

PHRASE, REFERENCED, PASSWORD = "open-sesame/4721 now", "a-referenced-value-4722", "of-a-url-4723"
LINES = "-----BEGIN-----\nfirst-line-4724\nsecond-line-4725\n-----END-----"
PLANTED = ("sesame", "referenced-value", PASSWORD, "first-line", "second-line")
SCRIPT = f"""
import json, logging, os, sys
from urllib.parse import quote
import torch, undula

PHRASE, LINES = os.environ["PHRASE"], os.environ["LINES"]
logging.basicConfig()

def speak(where):
    print(where, "printed", PHRASE, LINES)
    sys.stdout.write(where + " in pieces " + PHRASE[:7])
    sys.stdout.flush()
    sys.stdout.write(PHRASE[7:] + " all\\n")
    print(where, "in forms", quote(PHRASE), json.dumps(dict(lines=LINES)))
    logging.getLogger(where).warning("logged %s and %r", PHRASE, LINES)

def in_map(sample, rng):
    print("map printed", PHRASE)
    return sample

def train(run: undula.Run) -> None:
    speak("worker")
    run.map(in_map)
    model = run.model(torch.nn.Linear(1, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    for number, step in enumerate(run.steps()):
        for batch in step.batches():
            step.backward(model(batch["x"][:, None] / 48).square().mean())
        step.update()
        if number == 2:
            try:
                raise OSError(2, f"no login for {{PHRASE}}", f"/keys/{{LINES}}")
            except OSError as error:
                raise ValueError(f"login at https://me:{PASSWORD}@host with {{PHRASE}} and {{run.config['login']}}") from error

if __name__ == "__main__":
    speak("driver")
    undula.main(train)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write_numbers(tmp_path, 48)
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "talkative.py").write_text(SCRIPT)
    (tmp_path / "secrets.env").write_text(f"REFERENCED={REFERENCED}\n")
    (folder / "talkative.yaml").write_text(
        f"name: talkative\nruns: {tmp_path}/runs\ndata: {{train: {tmp_path}/data}}\n"
        "plan: {global_batch: 6, virtual_workers: 2, epochs: 1}\nworkers: {min: 1, max: 1}\n"
        "config:\n  login: me and ${env:REFERENCED}\n"
    )
    return folder


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("cluster", ()),
        pytest.param("cluster", ("data.head_mib=0",), marks=pytest.mark.soak, id="read tasks"),
        pytest.param("own cluster", (), marks=pytest.mark.soak, id="own cluster"),
        ("in process", ()),
    ],
)
def test_declared_secrets_are_masked_wherever_text_leaves_a_process(
    kind: str, overrides: tuple[str, ...], job: Path, session_jobs: Jobs
) -> None:
    cluster = session_jobs.cluster
    undula = str(Path(sys.executable).parent / "undula")
    env = {**os.environ, **cluster.env, "PHRASE": PHRASE, "LINES": LINES}
    options = {
        "cluster": ["--address", cluster.dashboard],
        "own cluster": [],
        "in process": ["--in-process"],
    }[kind]
    secrets = ["--secret", "PHRASE", "--secret", "LINES", "--secret-file", str(job.parent / "secrets.env")]
    done = subprocess.run(
        [undula, "run", str(job / "talkative.yaml"), *overrides, *options, *secrets],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    out = done.stdout + done.stderr
    assert done.returncode == 1, out
    for where in ("driver", "worker"):
        assert f"{where} printed *** -----BEGIN-----" not in out
        assert f"{where} printed *** ***\n" in out
        assert f"{where} in pieces *** all\n" in out
        assert f'{where} in forms *** {{"lines": "***"}}\n' in out or f"{where} in forms *** " in out
        assert f"WARNING:{where}:logged *** and '***" in out
    assert "ValueError: login at https://me:***@host with *** and me and ***\n" in out

    run = Store(str(job.parent / "runs" / "talkative"))
    texts = {"output": out, "events": str(read_ledger(run).events.to_pylist())}
    assert "with *** and" in texts["events"]
    for command in ("show", "report", "verify"):
        shown = subprocess.run([undula, command, run.url], env=env, capture_output=True, text=True, timeout=300)
        texts[command] = shown.stdout + shown.stderr
    folders = [Path(run.url)]
    if kind == "cluster":
        session = next(word for word in cluster.process.cmdline() if word.startswith("--temp-dir=")).partition("=")[2]
        folders += Path(session).glob("session_2*/logs")
    texts |= {str(path): path.read_bytes().decode(errors="replace") for folder in folders for path in files_in(folder)}
    assert any(path.endswith("report.html") for path in texts)
    assert not [(path, value) for path, text in texts.items() for value in PLANTED if value in text]


def files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
