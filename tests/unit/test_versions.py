"""Tests of the supported versions of other libraries: one range everywhere, and one sentence for all other versions."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import private_names
import pytest
from packaging.requirements import Requirement

from undula.errors import TESTED, SpecError

ROOT = Path(__file__).parents[2]


def test_pip_installs_the_tested_versions_and_no_compromised_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    stated = [Requirement(each) for each in (*project["dependencies"], *(each for extra in extras for each in extra))]
    found = [each for each in stated if each.name in TESTED]
    assert {each.name for each in found} == TESTED.keys() - {"lightning"}
    for each in found:
        oldest, newest = TESTED[each.name]
        major, minor = newest.split(".")
        compromised = {"!=2.6.2", "!=2.6.3"} if each.name == "pytorch-lightning" else set()
        assert set(map(str, each.specifier)) == {f">={oldest}", f"<{major}.{int(minor) + 1}", *compromised}


def test_the_documentation_has_the_tested_versions() -> None:
    rows = re.findall(r"^\| `([\w-]+)`.*\| ([\d.]+) \| ([\d.]+) \|$", (ROOT / "docs" / "migrate.md").read_text(), re.M)
    assert {name: (oldest, newest) for name, oldest, newest in rows} == TESTED


def test_private_names_are_listed_for_the_newest_version() -> None:
    listed = dict(key.split() for key in private_names.ALLOWED)
    assert {name: listed[name] for name in TESTED.keys() & listed.keys()} == {
        name: TESTED[name][1] for name in TESTED.keys() - {"lightning"}
    }


@pytest.mark.parametrize(
    ("library", "installed", "command"),
    [
        ("transformers", "4.56.2", ("-c", "import undula.adapters.transformers")),
        ("accelerate", "1.16.0", ("-c", "import undula.adapters.transformers")),
        ("accelerate", "1.5.2", ("-c", "import undula.adapters.accelerate")),
        ("pytorch-lightning", "2.4.0", ("-c", "import undula.adapters.lightning")),
        ("lightning", "2.7.0rc1", ("-c", "import undula.adapters.lightning")),
        ("ray", "2.57.1", ("-m", "undula.cli", "run", "jobs/language_model.yaml")),
        ("ray", "3.0.0.dev0", ("jobs/language_model.py", "--config", "jobs/language_model.yaml")),
    ],
)
def test_another_version_is_one_sentence(
    tmp_path: Path, library: str, installed: str, command: tuple[str, ...]
) -> None:
    done = with_version(tmp_path, library, installed, *command)
    oldest, newest = TESTED[library]
    assert done.returncode == SpecError.status
    assert done.stderr == (
        f"undula: {library} {installed} is installed, but Undula is tested with {oldest} to {newest}; "
        f"run pip install '{library}=={newest}.*'\n"
    )


@pytest.mark.parametrize("library", ["pytorch-lightning", "lightning"])
def test_a_compromised_version_is_one_sentence(tmp_path: Path, library: str) -> None:
    done = with_version(tmp_path, library, "2.6.3", "-c", "import undula.adapters.lightning")
    assert done.returncode == SpecError.status
    assert done.stderr == (
        f"undula: {library} 2.6.3 is installed, which an attacker has published; remove it, and run pip install '{library}==2.6.*'\n"
    )


def with_version(folder: Path, library: str, installed: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Python that finds the metadata of another version of a library."""
    metadata = folder / f"{library.replace('-', '_')}-{installed}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: {installed}\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
