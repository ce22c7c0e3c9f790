"""Scripts in the manner of the libraries' own examples, as they were and as they are: they train, and faults change no bit of them."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from alone import train_alone
from chaos_kit import assert_certified, run_through, steps_of
from numbers_job import lost_variables

from undula.testing.faults import parse_faults
from undula.testing.nodes import Nodes

FOLDER = Path(__file__).parents[1] / "gallery"
NEEDS_HOROVOD = pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed: make horovod")
NAMES = [
    pytest.param(name, marks=[NEEDS_HOROVOD] if "horovod" in name else [])
    for name in sorted(file.name.removesuffix("_before.py") for file in FOLDER.glob("*_before.py"))
]
FAULTS = """
at step 5: sigkill worker 1
at step 15: drain node 0 deadline 3
at step 16: add node
"""
STEPS_AFTER = 4
PACE = """
import time
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: time.sleep(0.1))
"""
"""Beginning of a script whose steps take some time, because faults are scheduled by step."""

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly]


def endless(name: str) -> tuple[str, ...]:
    """Return overrides with which a script trains for long."""
    script = (FOLDER / f"{name}.py").read_text()
    if "launch(main)" not in script:
        return "plan.epochs=10000", "plan.max_steps=100000"
    option = "--num_train_epochs" if "HfArgumentParser" in script else "--epochs"
    return (f"config.arguments={option} 10000",)


@pytest.mark.parametrize("name", NAMES)
def test_the_script_runs_as_it_was(name: str, tmp_path: Path) -> None:
    for file in (FOLDER / f"{name}_before.py", FOLDER / "shapes.py"):
        shutil.copy(file, tmp_path)
    done = subprocess.run(
        [sys.executable, f"{name}_before.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", NAMES)
def test_faults_change_no_bit_of_the_script_as_it_is(
    name: str, spot: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the run that is left alone writes its files
    for file in (FOLDER / f"{name}.yaml", FOLDER / "shapes.py"):
        shutil.copy(file, tmp_path)
    script = tmp_path / f"{name}.py"
    script.write_text(PACE + (FOLDER / script.name).read_text())
    command = [sys.executable, str(script), f"runs={tmp_path}/runs", *endless(name)]
    url = f"{tmp_path}/runs/faults"
    chaos = run_through(parse_faults(FAULTS), spot, [*command, "name=faults"], url, STEPS_AFTER)
    assert len(chaos.injected) == 3
    assert lost_variables(url) == []
    steps = steps_of(url)
    alone = train_alone([*command, "name=alone", "engine=torch"], until=steps)
    assert_certified(url, alone.url, steps)
