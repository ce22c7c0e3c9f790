"""Tests of training in the calling process: it makes the bits of a worker, and debuggers work there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from alone import train_alone
from jobs_kit import LANGUAGE_MODEL, SMALL
from night import at_night

from undula.report.data.goodput import goodput
from undula.state.commit import find_commits
from undula.state.events import FailEvent
from undula.state.ledger import decode_events, last_event, read_ledger
from undula.storage import open_store

JOB = str(LANGUAGE_MODEL.with_suffix(".yaml"))
SCRIPT = """
import sys
import torch
import undula

def train(run):
    breakpoint()
    model = run.model(torch.nn.Linear(4, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr))
    print("model made")
    for step in run.steps():
        for batch in step.batches():
            step.backward(model(torch.ones(len(batch["text"]), 4)).mean())
        step.update()
        AT_STEP

undula.main(train)
print("has ray:", "ray" in sys.modules)
"""


def run_here(*arguments: str, given: str = "", module: str = "undula.cli") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", module, "run", *arguments, "--in-process"]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=300)


@pytest.fixture
def script(text: str, tmp_path: Path) -> Path:
    """Script that trains for a moment, beside its YAML."""
    file = tmp_path / "job.py"
    file.write_text(SCRIPT.replace("AT_STEP", "pass"))
    file.with_suffix(".yaml").write_text(
        f"name: job\nruns: {tmp_path}/runs\ndata: {{train: {text}/train}}\n"
        "plan: {global_batch: 8, virtual_workers: 2, max_steps: 2}\nschedule: {base_lr: 0.1}\n"
    )
    return file


@pytest.mark.parametrize(
    "settings", [(), pytest.param(("data.head_mib=0",), marks=pytest.mark.nightly)], ids=["head", "all"]
)
def test_it_makes_the_bits_of_a_worker(text: str, tmp_path: Path, settings: tuple[str, ...]) -> None:
    data = (f"data.train={text}/train", f"data.validation={text}/validation", f"runs={tmp_path}")
    common = (*SMALL, *data, "plan.max_steps=20", "deterministic=true")
    done = run_here(JOB, *common, "name=here", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished: validation loss" in done.stdout
    worker = train_alone([sys.executable, str(LANGUAGE_MODEL), *common, "name=worker"])
    here, other = read_ledger(open_store(f"{tmp_path}/here")).steps, read_ledger(worker).steps
    assert here["loss"].to_pylist() == other["loss"].to_pylist()
    assert [digest for digest in here["weights_digest"].to_pylist() if digest]
    assert here["weights_digest"].to_pylist() == other["weights_digest"].to_pylist()


def test_breakpoints_stop_the_training_once_and_ray_is_not_needed(script: Path) -> None:
    done = run_here(str(script.with_suffix(".yaml")), given="p 'at', run.rank\ncontinue\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("('at', 0)") == 1
    assert done.stdout.count("model made") == 1
    assert "has ray: False" in done.stdout
    ledger = read_ledger(open_store(f"{script.parent}/runs/job"))
    assert goodput(ledger, decode_events(ledger.events)).share > 0


LIBRARY = """
import itertools
import torch

_numbers = itertools.count()

class Dense(torch.nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        number = next(_numbers)
        self.name = f"dense_{number}" if number else "dense"

class Sequential(torch.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleDict({layer.name: layer for layer in layers})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x
"""


@pytest.mark.nightly
def test_a_library_may_count_the_layers_of_a_process(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's check makes the model once, and the training once more."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "counting.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    made = "counting.Sequential(counting.Dense(4, 3), counting.Dense(3, 1))"
    text = SCRIPT.replace("breakpoint()", "import counting").replace("torch.nn.Linear(4, 1)", made)

    def run(after: str) -> "subprocess.CompletedProcess[str]":
        script.write_text(text.replace("        AT_STEP", f"    {after}"))
        return run_here(str(script.with_suffix(".yaml")))

    failed = run("raise KeyError('predictions')")
    assert failed.returncode == 1
    resumed = run("print('predictions written')")
    assert resumed.returncode == 0, resumed.stderr
    assert "Training resumed from the checkpoint at step 2" in resumed.stdout
    names = find_commits(open_store(f"{tmp_path}/runs/job"))[0][0].tensors
    assert {"model.layers.dense.weight", "model.layers.dense_1.weight"} <= set(names), (
        "as in a process that trains alone"
    )
    text = text.replace("    import counting", "    import counting; counting.Dense(1, 1)")
    other = run("pass")
    assert other.returncode == 2
    assert "because a library counts the layers that a process makes, as Keras does, let it count anew" in other.stderr


def test_an_exception_keeps_its_traceback_and_is_recorded(script: Path) -> None:
    script.write_text(SCRIPT.replace("breakpoint()", "").replace("AT_STEP", "assert step.index < 1, 'of the script'"))
    done = run_here(str(script.with_suffix(".yaml")))
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("AssertionError: of the script")
    assert "in train\n" in done.stderr
    failure = last_event(read_ledger(open_store(f"{script.parent}/runs/job")).events, FailEvent)
    assert failure is not None
    line = script.read_text().splitlines().index("        assert step.index < 1, 'of the script'") + 1
    assert failure.error == f"AssertionError: of the script at job.py:{line}"


@pytest.mark.parametrize(
    ("exits", "reason"),
    [
        ("sys.exit()", "the script ended after 1 of 2 steps on rank 0"),
        ("sys.exit('enough')", "the script ended rank 0 with sys.exit('enough')"),
    ],
)
def test_an_exit_in_mid_run_is_no_success(script: Path, exits: str, reason: str) -> None:
    script.write_text(SCRIPT.replace("breakpoint()", "").replace("AT_STEP", exits))
    done = run_here(str(script.with_suffix(".yaml")))
    assert done.returncode == 2, done.stdout + done.stderr
    line = len(script.read_text().rpartition(exits)[0].splitlines())
    assert done.stderr.startswith(f"undula: {reason}")
    assert done.stderr.endswith(f"(job.py:{line})\n")


@pytest.mark.nightly
def test_a_variable_of_a_launcher_is_named_when_it_is_read(script: Path) -> None:
    reads = 'assert sys.modules["os"].environ["RANK"]'
    script.write_text(SCRIPT.replace("breakpoint()", "").replace("        AT_STEP", f"    {reads}"))
    done = run_here(str(script.with_suffix(".yaml")))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("undula: the script reads the environment variable RANK, which launchers such as")


@pytest.mark.parametrize("end", ["sys.exit()", *at_night(["torch.distributed.destroy_process_group()"])])
def test_the_end_of_a_script_of_torchrun_is_that_of_a_run(script: Path, end: str) -> None:
    script.write_text(SCRIPT.replace("breakpoint()", "").replace("        AT_STEP", f"    {end}"))
    done = run_here(str(script.with_suffix(".yaml")))
    assert done.returncode == 0, done.stderr
    assert "finished: " in done.stdout


@pytest.mark.parametrize(("place", "status"), [*at_night([("breakpoint()", 143)]), ("AT_STEP", 130)])
def test_a_signal_ends_the_training_and_the_checks_before_it(script: Path, place: str, status: int) -> None:
    text = SCRIPT.replace(place, "import signal; signal.raise_signal(signal.SIGTERM)")
    script.write_text(text.replace("breakpoint()", "").replace("AT_STEP", "pass"))
    done = run_here(str(script.with_suffix(".yaml")))
    assert (done.returncode, done.stderr) == (status, "")


def test_a_refusal_names_the_line_of_the_script(script: Path) -> None:
    script.write_text(SCRIPT.replace("breakpoint()", "").replace("AT_STEP", "step.update()"))
    done = run_here(str(script.with_suffix(".yaml")))
    assert done.returncode == 2
    second = len(script.read_text().rpartition("step.update()")[0].splitlines())
    assert done.stderr.rstrip().endswith(f"(job.py:{second})")


def test_another_optimizer_than_the_saved_one_is_one_sentence(script: Path) -> None:
    text = SCRIPT.replace("breakpoint()", "")
    script.write_text(text.replace("AT_STEP", "step.index == 4 and sys.exit('enough')"))
    command = str(script.with_suffix(".yaml")), "plan.max_steps=6", "checkpoint.every_steps=1"
    assert run_here(*command).returncode == 2
    script.write_text(text.replace("AT_STEP", "pass").replace("SGD", "AdamW"))
    done = run_here(*command)
    assert done.returncode == 2, done.stderr
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(
        "undula: the run was saved with the optimizer SGD of torch, and run.optimizer() got AdamW"
    )


def test_epochs_that_end_before_the_steps_that_the_job_asks_for_are_named_first(script: Path) -> None:
    script.write_text(SCRIPT.replace("breakpoint()", "").replace("AT_STEP", "pass"))
    done = run_here(str(script.with_suffix(".yaml")), "plan.max_steps=12345", "plan.global_batch=4000")
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.split("\nstep ")
    steps = last.split("/")[1].split()[0]
    assert f"plan.epochs is 1, so the run ends after {steps} step" in first
    assert "before the 12,345 of plan.max_steps" in first


@pytest.mark.nightly
def test_work_after_the_last_step_that_has_failed_is_done_again(script: Path) -> None:
    def run(after: str) -> "subprocess.CompletedProcess[str]":
        script.write_text(SCRIPT.replace("breakpoint()", "").replace("        AT_STEP", f"    {after}"))
        return run_here(str(script.with_suffix(".yaml")))

    failed = run("raise KeyError('predictions')")
    assert failed.returncode == 1
    assert "The run finished after 2 steps." in failed.stdout
    again = run("print('predictions written')")
    assert again.returncode == 0
    assert "predictions written" in again.stdout
    done = run("print('predictions written')")
    assert "is finished, so there is nothing to do" in done.stdout


def test_a_second_call_of_main_is_refused(script: Path) -> None:
    script.write_text(SCRIPT.replace("breakpoint()", "").replace("AT_STEP", "pass") + "\nundula.main(train)\n")
    done = run_here(str(script.with_suffix(".yaml")))
    assert done.returncode == 2
    assert "undula: undula.main() was called twice in one script" in done.stderr.splitlines()[-1]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["accelerate_cv", "lightning_autoencoder"])
def test_a_script_of_an_adapter_is_checked_and_then_trains_in_the_same_process(name: str, tmp_path: Path) -> None:
    gallery = Path(__file__).parents[1] / "gallery"
    for file in (f"{name}.py", f"{name}.yaml", "shapes.py"):
        shutil.copy(gallery / file, tmp_path)
    done = run_here(f"{tmp_path}/{name}.yaml", f"runs={tmp_path}/runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished:" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--detach",), "command line: --in-process cannot be combined with --detach; remove one of them"),
        (("--address", "http://a:1"), "command line: --in-process cannot be combined with --address; remove one of"),
        pytest.param(
            ("workers.gpus=1",),
            "command line: torch sees no GPU in this process; set workers.gpus=0",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (("engine=horovod",), "command line: --in-process cannot be combined with engine=horovod; set engine=torch"),
    ],
)
def test_what_needs_a_cluster_is_refused(script: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run_here(str(script.with_suffix(".yaml")), *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
