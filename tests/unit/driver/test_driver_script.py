"""Tests of a job's driver: a script that starts no run is refused, and others run as `python script` runs them."""

import subprocess
from pathlib import Path

import pytest
from forked import run_script
from jobs_kit import ROOT

from undula.driver.script import FOLDER, run_submitted

DRIVER = ROOT / "platform" / "undula" / "driver" / "__main__.py"
SENTENCE = (
    "undula: job.py has ended and started no run; end it with undula.main(train), or with launch(main) of "
    "undula.adapters.transformers, undula.adapters.accelerate or undula.adapters.lightning\n"
)


def drive(folder: Path, text: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    script = folder / "job.py"
    script.write_text(text)
    return run_script(folder, DRIVER, [str(script), *arguments], {})


@pytest.mark.parametrize(
    ("text", "status", "err"),
    [
        ("print('trained')\n", 2, SENTENCE),
        ("print('trained')\nraise SystemExit\n", 2, SENTENCE),
        ("print('trained')\nraise SystemExit(3)\n", 3, ""),
    ],
)
def test_a_script_that_starts_no_run_fails(tmp_path: Path, text: str, status: int, err: str) -> None:
    done = drive(tmp_path, text)
    assert (done.returncode, done.stdout, done.stderr) == (status, "trained\n", err)


PARSES = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n"


@pytest.mark.parametrize(
    ("text", "reason", "line"),
    [
        ("import os\nrank = int(os.environ['LOCAL_RANK'])\n", "reads the environment variable LOCAL_RANK", 2),
        ("import os\n\nrank = int(os.getenv('RANK'))\n", "reads the environment variable RANK", 3),
        ("import os\nsize = int(os.environ.get('WORLD_SIZE'))\n", "reads the environment variable WORLD_SIZE", 2),
        ("import os\nhost = os.environ['MASTER_ADDR']\n", "reads the environment variable MASTER_ADDR", 2),
        (PARSES, "parses a command line of its own, but gets that of the job", 4),
        (
            "import torch.distributed as dist\ndist.init_process_group('gloo')\n",
            "calls torch.distributed.init_process_",
            2,
        ),
        ("import torch.distributed as dist\ndist.barrier()\n", "uses torch.distributed where no run has made", 2),
    ],
)
def test_what_a_launchers_script_does_before_a_run_is_refused_with_its_line(
    tmp_path: Path, text: str, reason: str, line: int
) -> None:
    done = drive(tmp_path, text, "--config", "job.yaml")
    assert done.returncode == 2
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith(f"undula: the script {reason}")
    assert sentence.endswith(f"(job.py:{line})")


def test_a_process_group_that_a_script_has_made_is_refused(tmp_path: Path) -> None:
    made = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    done = drive(tmp_path, f"import torch.distributed as dist\nimport undula\n{made}\nundula.main(print)\n")
    assert done.returncode == 2
    assert done.stderr.startswith("undula: the script calls torch.distributed.init_process_group(), but a run makes")
    assert done.stderr.endswith("(job.py:3)\n")
    (tmp_path / "library.py").write_text(f"import torch.distributed as dist\n{made}\n")
    done = drive(tmp_path, "import library\nimport undula\nundula.main(print)\n")
    assert done.stderr.startswith("undula: a library has made torch's process group before the run")


def test_a_script_that_calls_main_gets_its_arguments_and_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: job\n")
    (tmp_path / "beside.py").write_text("def train(run): ...\n")
    text = "import undula\nfrom beside import train\nif __name__ == '__main__':\n    undula.main(train)\n"
    done = drive(tmp_path, text, "--print", "plan.seed=5")
    assert done.returncode == 0, done.stderr
    assert "seed: 5" in done.stdout


def test_a_folder_with_the_same_path_is_not_taken_for_the_submitted_one_if_a_file_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    monkeypatch.setattr("undula.driver.script.run_script", lambda script, arguments: started.append(script))
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "copy", tmp_path / "mine"):
        folder.mkdir()
        (folder / "job.py").write_text("import helper")
        (folder / "helper.py").write_text("VALUE = 1")
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    (tmp_path / "mine" / "outputs.txt").write_text("not submitted")
    run_submitted(tmp_path / "copy" / "job.py", [])
    (tmp_path / "mine" / "helper.py").write_text("VALUE = 2")
    run_submitted(tmp_path / "copy" / "job.py", [])
    assert started == [tmp_path / "mine" / "job.py", tmp_path / "copy" / "job.py"]
    assert Path.cwd() == tmp_path / "copy"
