"""Tests of the benchmarks that need not run one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ABSENT = 'raise ModuleNotFoundError("No module named \'moto\'", name="moto")\n'


def test_bench_data_without_the_test_dependencies_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "moto.py").write_text(ABSENT)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "tests.baselines.bench_data", "--kinds", "floats", "--mib", "1"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "undula: moto is not installed; run pip install 'undula[dev]'\n")
