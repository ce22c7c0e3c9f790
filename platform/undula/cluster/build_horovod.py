"""Command `undula build-horovod`, which builds Horovod once against the installed torch and installs it.

The package index offers Horovod 0.28.1 only as a source distribution, which does not compile with the headers of current versions of
torch. The patch file next to this module contains the necessary changes and explains each of them.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from undula.errors import ClusterError

VERSION = "0.28.1"
PATCH = Path(__file__).with_name(f"horovod-{VERSION}.patch")
PATCH_COMMANDS = (("git", "apply"), ("patch", "--strip=1", "--fuzz=0", "--batch"))
"""Commands that apply a patch from stdin to the working directory, in order of preference. A machine may have only one of them, because git
does not depend on patch."""
DEFAULT_BUILD_ENV = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_CPU_OPERATIONS": "GLOO",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 rejects version 2.8, which the bundled gloo asks for
    "MAKEFLAGS": f"-j{os.cpu_count()}",
}
"""Environment variables of the build; the user's environment takes precedence over them."""
REQUIRED_TOOLS = {
    "a C++ compiler": ("CXX", "c++", "g++", "clang++"),
    "CMake": ("HOROVOD_CMAKE", "cmake"),
    "make": ("MAKE", "make"),
    "git or patch": ("", "git", "patch"),
}
"""Programs that the build needs. Each has the environment variable that can name it, followed by the names to search for."""
FAILURE_PATTERNS = (
    r"fatal error: .*",
    r"CMake Error[^\n]*\n[^\n]*",
    r"Could NOT find .*",
    r"Killed.*",
    r"No module named .*",
    r"undefined reference .*",
    r"(?m)^ERROR: .*",
    r"(?m)^ *error: (?!subprocess-exited).*",
)
"""Patterns of log lines that give the reason for a failed build, the most specific first."""


def build_horovod(cache: Path) -> None:
    """Install Horovod into this Python from a wheel in `cache`. If the cache does not have the wheel, build it first.

    Environment variables that begin with HOROVOD_ are passed to the build, such as HOROVOD_GPU_OPERATIONS=NCCL for GPUs.

    Raises:
        ClusterError: A tool that the build needs is missing, or the build failed.
    """
    folder = cache / build_name(os.environ)
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        _check_tools()
        print(f"building Horovod {VERSION} for torch {version('torch')}, which takes a few minutes", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        wheels = [_build_wheel(folder)]
    print(f"installing {wheels[0]}", flush=True)
    _pip(folder, "install", "--quiet", "--force-reinstall", "--no-deps", str(wheels[0]))
    _pip(folder, "install", "--quiet", f"horovod=={VERSION}")  # installs the dependencies


def build_name(env: Mapping[str, str]) -> str:
    """Return the name of a build's cache folder. Builds that cannot replace each other have different names."""
    choices = "".join(f"-{name[8:].lower()}-{env[name].lower()}" for name in sorted(env) if name.startswith("HOROVOD_"))
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}-{sysconfig.get_platform()}"
    changes = sha256(PATCH.read_bytes()).hexdigest()[:8]
    return re.sub(r"[^\w.+-]", "_", f"horovod-{VERSION}-{changes}-torch-{version('torch')}-{tag}{choices}")


def apply_patch(source: Path) -> None:
    """Apply PATCH to an unpacked source distribution.

    Raises:
        ClusterError: The patch does not apply, because it was made for another source.
    """
    command = next(command for command in PATCH_COMMANDS if shutil.which(command[0]))
    done = subprocess.run(command, input=PATCH.read_text(), cwd=source, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join((done.stderr + done.stdout).split())
        raise ClusterError(
            f"{PATCH.name} does not apply to the package index's source distribution of Horovod {VERSION} ({reason}): "
            "configure pip to use the source distribution from pypi.org"
        )


def failure_reason(log: str) -> str:
    """Return the line of a failed build's log that gives the reason."""
    reason = next((match[0] for pattern in FAILURE_PATTERNS if (match := re.search(pattern, log))), "no reason given")
    return " ".join(reason.split())


def _check_tools() -> None:
    missing = [
        tool
        for tool, (variable, *names) in REQUIRED_TOOLS.items()
        if not any(map(shutil.which, [os.environ.get(variable, "").partition(" ")[0], *names]))
    ]
    if missing:
        raise ClusterError(
            f"building Horovod needs {' and '.join(missing)}, which this machine lacks: "
            "install them, on Debian with `apt-get install g++ cmake make patch`"
        )


def _build_wheel(folder: Path) -> Path:
    """Build a wheel from the package index's source and return its path. The wheel appears in `folder` only once it is complete."""
    with tempfile.TemporaryDirectory() as scratch:
        download = ("--no-deps", "--no-binary=:all:", f"--dest={scratch}", f"horovod=={VERSION}")
        _pip(folder, "download", "--quiet", *download)
        (archive,) = Path(scratch).glob("horovod-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        source = Path(scratch) / f"horovod-{VERSION}"
        apply_patch(source)
        with _spinner("compiling"):
            options = ("--no-deps", "--no-build-isolation", f"--wheel-dir={scratch}")
            _pip(folder, "wheel", *options, str(source), env=DEFAULT_BUILD_ENV)
        (wheel,) = Path(scratch).glob("horovod-*.whl")
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False) as partial:
            partial.write(wheel.read_bytes())
        return Path(partial.name).replace(folder / wheel.name)


@contextmanager
def _spinner(activity: str) -> Iterator[None]:
    """Show a spinner on the terminal during a long activity."""
    with Console(stderr=True).status(f"{activity} ..."):
        yield


def _pip(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run pip. If it fails, write its output to a log in `folder` and raise ClusterError."""
    command = (sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)
    done = subprocess.run(command, env={**(env or {}), **os.environ}, capture_output=True, text=True)
    if done.returncode:
        output = done.stdout + done.stderr
        log = folder / "failed.log"
        log.write_text(output)
        raise ClusterError(f"pip {arguments[0]} failed ({failure_reason(output)}): see {log}")
