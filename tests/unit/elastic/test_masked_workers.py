"""Tests of the order in which a worker's process masks its output and loads what is the user's."""

import subprocess
import sys
from pathlib import Path

from undula.masking.values import NAMES

SCRIPT = """
import sys, undula
print("top level of the script: open-sesame, WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567")
sys.stdout = sys.__stdout__

def train(run):
    pass

undula.main(train)
"""
WORKER = """
import sys
from pathlib import Path
from undula.elastic.ray.actor import ElasticWorker
from undula.elastic.worker import _execute
from undula.train import script_file
from undula.train.script_file import ScriptFile
from undula.train.work_folder import Origin

def of(text):
    origin = Origin.of_this_process(Path("job.py").resolve())
    return ScriptFile(str(Path.cwd()), origin, "token", "job.py", {"job.py": text.encode()}, (), 1)

ElasticWorker()
print("a module of the train function: open-sesame")
script = of(Path("job.py").read_text())
for group in range(2):
    script_file._ready = None
    _execute(script)
script_file._ready = None
_execute(of("raise ValueError(('in the script', 'open-sesame'))"))
"""


def test_a_worker_masks_what_is_printed_before_its_first_group(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    env = {"PYTHONPATH": ":".join(sys.path), "PHRASE": "open-sesame", NAMES: '["PHRASE"]'}
    done = subprocess.run([sys.executable, "-c", WORKER], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "a module of the train function: ***",
        *["top level of the script: ***, WANDB_API_KEY=***"] * 2,
    ]
    assert done.stderr.endswith("ValueError: ('in the script', '***')\n")
