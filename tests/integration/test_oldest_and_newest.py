"""The adapters' tests and the main job with the oldest and the newest version of each library, in environments of their own."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from small_text import MODEL, PLAN

from undula.errors import TESTED

ROOT = Path(__file__).parents[2]
BESIDE = ("accelerate", "datasets", "peft")
"""Libraries of which another one may need another version."""
OF_ADAPTERS = ("transformers", "accelerate", "pytorch-lightning")

pytestmark = [pytest.mark.timeout(1800), pytest.mark.nightly]


@pytest.mark.parametrize(
    ("library", "minor"), [(library, minor) for library in OF_ADAPTERS for minor in TESTED[library]]
)
def test_the_adapters_work_with_a_version(library: str, minor: str) -> None:
    succeed(environment(library, minor, library), "-m", "pytest", "tests/unit/adapters")


@pytest.mark.parametrize("minor", TESTED["ray"])
def test_the_main_job_trains_and_workers_come_and_go_with_a_version_of_ray(
    minor: str, text: str, tmp_path: Path
) -> None:
    python = environment("ray", minor, "ray[data,default,train]")
    on_clusters = ("integration/test_plain_script.py", "chaos/test_elastic.py", "chaos/test_autoscaler.py")
    succeed(python, "-m", "pytest", "tests/unit/elastic", *(f"tests/{name}" for name in on_clusters))
    data = (f"data.train={text}/train", f"data.validation={text}/validation")
    run = ("jobs/language_model.yaml", f"runs={tmp_path}", *data, *PLAN, *MODEL, "plan.max_steps=3")
    assert "language-model" in succeed(python, "-m", "undula.cli", "run", *run)


def environment(library: str, minor: str, requirement: str) -> Path:
    """Return the interpreter of an environment that has a version of a library, and everything else from the environment of the tests."""
    folder = ROOT / ".venv-versions" / f"{library}-{minor}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "rest.pth").write_text(f"{ROOT / 'platform'}\n{sysconfig.get_path('purelib')}\n")
    pip = ("-m", "pip", "--python", str(python), "install", "-qq", "--disable-pip-version-check")
    succeed(Path(sys.executable), *pip, f"{requirement}=={minor}.*", *BESIDE)
    version = succeed(python, "-c", f"import importlib.metadata as found; print(found.version('{library}'))")
    assert version.startswith(f"{minor}.")
    return python


def succeed(python: Path, *arguments: str) -> str:
    """Run Python in the folder of the project, and return what it prints."""
    done = subprocess.run([python, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout
