"""Test with real jobs that a script may print, log and raise the secrets that its user has declared, and that no record shows them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs_kit import Jobs
from numbers_job import write_numbers

from undula.cluster.local import LocalCluster
from undula.state.ledger import read_ledger
from undula.storage import Store

UNDULA = str(Path(sys.executable).parent / "undula")
PHRASE, REFERENCED, PASSWORD = "open-sesame/4721 now", "a-referenced-value-4722", "of-a-url-4723"
LINES = "-----BEGIN-----\nfirst-line-4724\nsecond-line-4725\n-----END-----"
PLANTED = ("sesame", "referenced-value", PASSWORD, "first-line", "second-line")
SCRIPT = f"""
import json, logging, os, sys
from urllib.parse import quote
import ray, torch, undula

PHRASE, LINES = (os.environ.get(name) or os.environ["REFERENCED"] for name in ("PHRASE", "LINES"))
logging.basicConfig()
if os.environ.get("RAISES") == "import" and ray.is_initialized():  # in a worker
    raise ImportError(f"no {{PHRASE}}")

def speak(where):
    print(where, "printed", PHRASE, LINES)
    sys.stdout.write(where + " in pieces " + PHRASE[:7])
    sys.stdout.flush()
    sys.stdout.write(PHRASE[7:] + " all\\n")
    print(where, "in forms", quote(PHRASE), json.dumps(dict(lines=LINES)))
    logging.getLogger(where).warning("logged %s and %r", PHRASE, LINES)

def in_map(sample, rng):
    print("map printed", PHRASE)
    if os.environ.get("RAISES") == "map":
        raise KeyError(f"no {{PHRASE}}")
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
    (folder / "study.yaml").write_text(
        "name: studied\njob: talkative.yaml\nbatches: [6]\nbase_lrs: [0.1]\nmetric: training_loss\npacked: 1\nsamples: 48\n"
        "overrides: {schedule.warmup_samples: 0}\n"
    )
    return folder


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("cluster", ()),
        pytest.param("cluster", ("data.head_mib=0",), marks=pytest.mark.nightly, id="read tasks"),
        pytest.param("own cluster", (), marks=pytest.mark.nightly, id="own cluster"),
        ("in process", ("--in-process",)),
    ],
)
def test_declared_secrets_are_masked_wherever_text_leaves_a_process(
    kind: str, options: tuple[str, ...], job: Path, session_jobs: Jobs
) -> None:
    cluster = session_jobs.cluster if kind == "cluster" else None
    out = talk("run", job, cluster, *options)
    for where in ("driver", "worker"):
        assert f"{where} printed *** ***\n" in out
        assert f"{where} in pieces *** all\n" in out
        assert f'{where} in forms *** {{"lines": "***"}}\n' in out
        assert f"WARNING:{where}:logged *** and '***" in out
    assert "ValueError: login at https://me:***@host with *** and me and ***\n" in out
    run = Store(str(job.parent / "runs" / "talkative"))
    assert "login at https://me:***@host with *** and" in str(read_ledger(run).events.to_pylist())
    assert_nothing_shows(out, run, cluster)


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["map", "import"])
def test_declared_secrets_are_masked_where_else_a_script_raises(place: str, job: Path, session_jobs: Jobs) -> None:
    out = talk("run", job, session_jobs.cluster, "data.head_mib=0", "--env", f"RAISES={place}")
    assert "no ***" in out
    assert_nothing_shows(out, Store(str(job.parent / "runs" / "talkative")), session_jobs.cluster)


@pytest.mark.nightly
def test_declared_secrets_of_a_study_are_masked(job: Path, session_jobs: Jobs) -> None:
    out = talk("study", job, session_jobs.cluster, "overrides.config.more=${env:REFERENCED}")
    assert_nothing_shows(out, Store(str(job.parent / "runs" / "studied")), session_jobs.cluster)


@pytest.mark.nightly
def test_a_script_that_is_run_directly_masks_what_its_settings_refer_to(job: Path, session_jobs: Jobs) -> None:
    cluster = session_jobs.cluster
    env = {**os.environ, **cluster.env, "RAY_ADDRESS": cluster.address, "REFERENCED": REFERENCED}
    done = subprocess.run(
        [sys.executable, str(job / "talkative.py")], env=env, capture_output=True, text=True, timeout=300
    )
    assert "worker printed *** ***" in done.stdout, done.stderr
    since_main = done.stdout.partition(" all\n")[2].partition("\n")[
        2
    ]  # the settings are read after the script has spoken
    assert_nothing_shows(since_main, Store(str(job.parent / "runs" / "talkative")), cluster)


def talk(command: str, job: Path, cluster: LocalCluster | None, *options: str) -> str:
    """Run the job or its study, which fails, with declared secrets, and return what it prints."""
    of_cluster = {**cluster.env, "RAY_API_SERVER_ADDRESS": cluster.dashboard} if cluster else {}
    secrets = ["--secret", "PHRASE", "--secret", "LINES", "--secret-file", str(job.parent / "secrets.env")]
    done = subprocess.run(
        [UNDULA, command, str(job / ("talkative.yaml" if command == "run" else "study.yaml")), *options, *secrets],
        env={**os.environ, **of_cluster, "PHRASE": PHRASE, "LINES": LINES},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout + done.stderr


def assert_nothing_shows(out: str, run: Store, cluster: LocalCluster | None) -> None:
    """Search for secrets in an output, in all files and pages of a run or a study, and in Ray's logs."""
    texts = {"output": out}
    if (Path(run.url) / "job.json").exists():
        texts["events"] = str(read_ledger(run).events.to_pylist())
        for command in ("show", "report"):
            shown = subprocess.run([UNDULA, command, run.url], capture_output=True, text=True, timeout=300)
            texts[command] = shown.stdout + shown.stderr
        assert Path(run.url, "report.html").exists()
    folders = [Path(run.url)]
    if cluster:
        session = next(word for word in cluster.process.cmdline() if word.startswith("--temp-dir=")).partition("=")[2]
        folders += Path(session).glob("session_2*/logs")
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    texts |= {str(path): path.read_bytes().decode(errors="replace") for path in files}
    if cluster:
        assert [path for path, text in texts.items() if "/worker-" in path and "printed ***" in text], (
            "Ray's logs lack output"
        )
    assert not [(path, value) for path, text in texts.items() for value in PLANTED if value in text]
