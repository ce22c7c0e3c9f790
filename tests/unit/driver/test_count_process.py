"""Tests of the process in which a job's steps are counted before workers start."""

import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import TensorDataset
from waiting import wait_until

from undula.data.script.dataset import script_data
from undula.driver.count_process import counting
from undula.parallel.spec import ActivationsSpec
from undula.plan.plan import PlanSpec
from undula.train.dry_run.counting import Count, Setting
from undula.train.job import Job
from undula.train.script_file import ScriptFile
from undula.train.work_folder import Origin

OWN = Setting("fp32", ActivationsSpec(), 4)
SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
import torch
import undula
{top}

def train(run):
    run.dataset(torch.utils.data.TensorDataset(torch.zeros(64, 8)))
    model = run.model(torch.nn.Linear(8, 2, bias=False))
    run.optimizer(torch.optim.AdamW(model.parameters(), lr=run.base_lr))
    {begin}
    for step in run.steps():
        for (x,) in step.batches():
            step.backward(model(x).mean())
        step.update()

undula.main(train)
{after}
"""


def script(folder: Path, top: str = "", begin: str = "", after: str = "") -> ScriptFile:
    file = folder / "job.py"
    file.write_text(SCRIPT.format(top=top, begin=begin, after=after))
    origin = Origin.of_this_process(file)
    return ScriptFile(str(folder), origin, "token", file.name, {file.name: file.read_bytes()}, ("--fresh",), 1)


def job(folder: Path) -> Job:
    data = script_data(TensorDataset(torch.zeros(64, 8)), None, None, 0, {})
    plan = PlanSpec(global_batch=8, virtual_workers=2)
    return Job(name="run", run_url=str(folder / "run"), plan=plan, script_data=data)


def has_ended(process: psutil.Process | None) -> bool:
    return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def count(folder: Path, top: str = "", begin: str = "", after: str = "") -> Count | None:
    with counting(script(folder, top, begin, after), job(folder), [OWN]) as result:
        return result()


def pid_in(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_a_script_is_counted_as_rank_1_without_gpus_and_up_to_its_call_of_main(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "undula")
    counted = count(
        tmp_path,
        top="print('top', flush=True); breakpoint(); Path('top').write_text(' '.join(sys.argv)); assert not sys.stdin.read()",
        begin="assert (run.rank, run.world_size, os.environ['CUDA_VISIBLE_DEVICES']) == (1, 2, ''); os.write(1, b'begin')",
        after="Path('after').touch()",
    )
    assert counted is not None, caplog.messages
    assert counted.is_fake
    assert (counted.state.parameters, counted.state.parameter_bytes) == (16, 64)
    assert counted.state.optimizer_bytes == 2 * 64 + 4, "two moments and the number of the step"
    assert counted.passes[OWN].batch_bytes == 4 * 8 * 4
    assert (Path.cwd() / "top").read_text() == f"{tmp_path / 'job.py'} --fresh", "it works in the folder of the driver"
    assert not (Path.cwd() / "after").exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("top", "begin", "reason"),
    [
        ("raise ValueError('no such file')", "", "ValueError: no such file"),
        ("sys.exit(4)", "", r"job.py has ended with sys.exit\(4\)"),
        ("", "os._exit(0)", "no output"),
    ],
)
def test_nothing_is_known_of_a_script_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, top: str, begin: str, reason: str
) -> None:
    with caplog.at_level("INFO", "undula"):
        assert count(tmp_path, top=top, begin=begin) is None
    (record,) = caplog.records
    assert re.search(reason, record.message)
    assert record.levelname == "INFO"
    assert record.message.startswith("the memory of a step is not known in advance: ")


@pytest.mark.parametrize(
    ("top", "asks"),
    [
        ("import beside", False),
        (
            "sys.path.insert(0, '../lib'); import elsewhere",
            True,
        ),  # a module that no search of the script's folder finds
        ("hooks = torch.autograd.graph.saved_tensors_hooks", True),
    ],
)
def test_a_script_that_may_need_less_on_a_gpu_is_known_by_its_words(tmp_path: Path, top: str, asks: bool) -> None:
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "elsewhere.py").write_text("import torch; has = torch.cuda.is_available()")
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "beside.py").write_text("import base64")
    counted = count(folder, top=top.replace("../lib", str(lib)))
    assert counted is not None
    assert counted.may_need_less is asks


@pytest.mark.nightly
def test_modules_of_the_working_directory_are_not_those_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base64.py").write_text("raise SystemExit('the wrong module')")
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    assert count(tmp_path / "job") is not None


def test_nothing_is_known_where_the_process_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert count(tmp_path) is None


def test_a_script_that_takes_too_long_ends_with_the_processes_that_it_has_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    top = "child = subprocess.Popen(['sleep', '600']); Path('pid').write_text(f'{child.pid}\\n'); time.sleep(600)"
    with counting(script(tmp_path, top), job(tmp_path), [OWN], limit_s=0.0, if_late="too late") as result:
        child = psutil.Process(pid_in(Path("pid")))
        parent = child.parent()
        assert result() is None
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", "too late")]
    wait_until(lambda: has_ended(parent) and has_ended(child), 30)


DRIVER = """
import pickle, sys
from undula.data.script.dataset import script_data
from undula.driver.count_process import counting
with counting(*pickle.load(sys.stdin.buffer)) as result:
    result()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_process_ends_with_its_driver(tmp_path: Path, number: int) -> None:
    hanging = script(tmp_path, top="Path('pid').write_text(f'{os.getpid()}\\n'); time.sleep(600)")
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Tests that run in the background may have SIGINT ignored, which child processes inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert driver.stdin is not None
    with driver.stdin as stdin:
        pickle.dump((hanging, job(tmp_path), [OWN]), stdin)
    process = psutil.Process(pid_in(Path("pid")))
    assert process.ppid() == driver.pid
    driver.send_signal(number)
    assert driver.wait(30) != 0
    wait_until(lambda: has_ended(process), 30)
