"""Tests of the execution of a script in a worker, up to the call of `undula.main` that the driver trains."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from undula.data.script import pickling
from undula.data.stored.maps import SampleMap
from undula.errors import UsageError
from undula.train import script_call, script_file, work_folder
from undula.train.script_file import ScriptFile
from undula.train.work_folder import Origin


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test execute scripts in this process as a worker does."""
    for name in ("__main__", script_call.OTHER_MAIN):
        if name in sys.modules:
            monkeypatch.setitem(sys.modules, name, sys.modules[name])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(Path.cwd())  # back to it at the end
    for module, name in (
        (script_call, "_calls"),
        *((script_file, name) for name in ("_ready", "_is_kept", "_written")),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(work_folder, "_here", None)
    monkeypatch.setattr(pickling, "_folder", None)
    yield
    for module in [name for name in sys.modules if name.startswith("beside_")]:
        del sys.modules[module]


def script(folder: Path, text: str, call: int = 1, **modules: str) -> ScriptFile:
    """Write a script and modules beside it, and return it as a driver sends it."""
    sources = {"job.py": text.encode(), **{f"{name}.py": content.encode() for name, content in modules.items()}}
    for name, content in sources.items():
        (folder / name).write_bytes(content)
    origin = Origin.of_this_process(folder / "job.py")
    return ScriptFile(str(folder), origin, "token", "job.py", sources, ("--config", "job.yaml"), call)


def result(train: ScriptFile) -> Any:
    """Return what the train function has appended to the object that stands for the run."""
    run: list[Any] = []
    train(run)
    return run[-1]


def test_each_call_executes_the_script_and_modules_beside_it_anew(tmp_path: Path) -> None:
    text = """
import sys, undula, beside_a
seen = []
def train(run):
    seen.append(1)
    beside_a.SEEN.append(1)
    run.append((len(seen), len(beside_a.SEEN), sys.argv[1:], __name__))
if __name__ == "__main__":
    undula.main(train)
"""
    train = script(tmp_path, text, beside_a="SEEN = []")
    assert [result(train), result(train)] == [(1, 1, ["--config", "job.yaml"], "__main__")] * 2


def test_what_was_made_ready_is_used_once_or_kept_for_all_calls(tmp_path: Path) -> None:
    train = script(
        tmp_path, "import undula\nseen = []\nundula.main(lambda run: (seen.append(1), run.append(len(seen))))"
    )
    train.make_ready()
    assert [result(train), result(train)] == [1, 1]
    train.make_ready(keeps=True)
    assert [result(train), result(train)] == [1, 2]


def test_a_worker_executes_what_the_driver_has_executed_although_the_files_were_edited(tmp_path: Path) -> None:
    text = "import undula, beside_b\nundula.main(lambda run: run.append((beside_b.VALUE, __file__)))"
    train = script(tmp_path, text, beside_b="VALUE = 'as sent'")
    value, file = result(train)
    assert (value, Path(file).parent) == ("as sent", tmp_path)
    (tmp_path / "beside_b.py").write_text("VALUE = 'edited'")
    value, file = result(train)
    assert value == "as sent"
    assert Path(file).parent != tmp_path


def test_a_worker_gets_the_train_function_of_the_call_that_trains(tmp_path: Path) -> None:
    text = "import undula\nfor number in (1, 2, 3):\n    undula.main(lambda run, number=number: run.append(number))"
    assert result(script(tmp_path, text, call=2)) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "job.py has ended in a worker without calling undula.main"),
        ("import os\nos.environ['RANK']", r"reads the environment variable RANK, .* \(job.py:2\)$"),
        ("import sys\nsys.exit(3)", r"job.py has ended with sys.exit\(3\) in a worker, before it called undula.main"),
    ],
)
def test_a_script_that_does_not_reach_its_call_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        script(tmp_path, text)([])


def test_a_script_does_not_choose_another_gpu_than_the_worker_has_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    text = "import os, undula\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nundula.main(lambda run: run.append(1))"
    result(script(tmp_path, text))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_process_that_imports_the_script_trains_nothing(tmp_path: Path) -> None:
    import multiprocessing

    text = """
import multiprocessing, undula
def double(number): return 2 * number
def train(run):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        run.append(pool.map(double, [1, 2]))
undula.main(train)
"""
    assert multiprocessing.parent_process() is None
    assert result(script(tmp_path, text)) == [2, 4]


def test_a_process_that_was_started_without_a_file_has_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    assert ScriptFile.of_this_process() is None


def test_read_tasks_get_what_a_map_of_samples_calls_in_modules_beside_the_script(tmp_path: Path) -> None:
    """Tasks of Ray Data do not execute the script, and their node may not have its folder."""
    text = "import beside_c, undula\nundula.main(lambda run: run.append(lambda sample, rng: beside_c.scaled(sample)))"
    function = result(script(tmp_path, text, beside_c="FACTOR = 2\ndef scaled(x):\n    return FACTOR * x"))
    content = cloudpickle.dumps(SampleMap(function, key=0, url="data", result=()))
    load = "import pickle, sys; print(pickle.load(sys.stdin.buffer).function(21, None))"
    done = subprocess.run([sys.executable, "-c", load], input=content, capture_output=True, cwd="/")
    assert done.stdout == b"42\n", done.stderr
