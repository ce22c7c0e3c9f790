"""Builds Horovod against the torch that is installed, once, and installs it: `undula build-horovod`.

The package index has Horovod 0.28.1 as a source distribution alone, and that asks for C++14, with which torch's headers of today do not
compile. Both of its CMake files that say so are set to C++17. Its gradients go over the interface to which the host's name resolves, a
loopback on many a machine, whatever HOROVOD_GLOO_IFACE says: one line is set to what it says.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from undula.errors import ClusterError

VERSION = "0.28.1"
STANDARD = (r"set\(CMAKE_CXX_STANDARD 14\)", "set(CMAKE_CXX_STANDARD 17)")
INTERFACE = (r"(?s)(::InitializeForProcessSet\(.*?\.iface = )gloo_iface_;", r"\1global_context.gloo_iface_;")
FIXED = (
    r"(BayesianParameter::SetValue\((?:.|\n)*?ResetBayes\(\);\n  \}) else \{",
    r"\1 else if (fixed_values_.find(variable) == fixed_values_.end()) {",
)
MENDS: Mapping[str, tuple[str, str]] = {
    "CMakeLists.txt": STANDARD,
    "horovod/torch/CMakeLists.txt": STANDARD,
    "horovod/common/gloo/gloo_context.cc": INTERFACE,
    "horovod/common/parameter_manager.cc": FIXED,
}
"""What is changed of the source: file, pattern, replacement."""
CHOICES = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_CPU_OPERATIONS": "GLOO",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the 2.8 of the gloo that comes along
    "MAKEFLAGS": f"-j{os.cpu_count()}",
}
"""What is built where the environment does not say otherwise."""
TOOLS = {
    "a C++ compiler": ("CXX", "c++", "g++", "clang++"),
    "CMake": ("HOROVOD_CMAKE", "cmake"),
    "make": ("MAKE", "make"),
}
"""What is needed: the variable that may name it, and what it is called."""
REASONS = (
    r"fatal error: .*",
    r"CMake Error[^\n]*\n[^\n]*",
    r"Could NOT find .*",
    r"Killed.*",
    r"No module named .*",
    r"undefined reference .*",
    r"(?m)^ERROR: .*",
)
"""Lines of a failed build that say why, those that say it best first."""


def build_horovod(cache: Path) -> None:
    """Install Horovod into this Python, from a wheel in `cache`, which is built where it is not there.

    Variables of the environment that begin with HOROVOD_ go to the build: HOROVOD_GPU_OPERATIONS=NCCL for GPUs.

    Raises:
        ClusterError: something that the build needs is missing, or it failed.
    """
    folder = cache / _build_name(os.environ)
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        _check_tools()
        print(f"building Horovod {VERSION} for torch {version('torch')}, which takes some minutes", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        wheels = [_built(folder)]
    print(f"installing {wheels[0]}", flush=True)
    _pip(folder, "install", "--quiet", "--force-reinstall", "--no-deps", str(wheels[0]))
    _pip(folder, "install", "--quiet", f"horovod=={VERSION}")  # what it depends on


def _build_name(env: Mapping[str, str]) -> str:
    """Tells apart builds that cannot stand in for each other."""
    choices = "".join(f"-{name[8:].lower()}-{env[name].lower()}" for name in sorted(env) if name.startswith("HOROVOD_"))
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}-{sysconfig.get_platform()}"
    mends = sha256(json.dumps(MENDS).encode()).hexdigest()[:8]
    return re.sub(r"[^\w.+-]", "_", f"horovod-{VERSION}-{mends}-torch-{version('torch')}-{tag}{choices}")


def _check_tools() -> None:
    missing = [
        what
        for what, (variable, *names) in TOOLS.items()
        if not any(map(shutil.which, [os.environ.get(variable, "").partition(" ")[0], *names]))
    ]
    if missing:
        raise ClusterError(
            f"building Horovod needs {' and '.join(missing)}, which this machine lacks: on Debian, apt-get install g++ cmake make"
        )


def _built(folder: Path) -> Path:
    """A wheel in a folder, from the package index's source; there only when it is whole."""
    with tempfile.TemporaryDirectory() as scratch:
        _pip(
            folder, "download", "--quiet", "--no-deps", "--no-binary=:all:", f"--dest={scratch}", f"horovod=={VERSION}"
        )
        (archive,) = Path(scratch).glob("horovod-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        source = Path(scratch) / f"horovod-{VERSION}"
        for name, (pattern, replacement) in MENDS.items():
            text, changes = re.subn(pattern, replacement, (source / name).read_text())
            if changes != 1:
                raise ClusterError(
                    f"{name} of Horovod {VERSION} is not what it was: the package index has another source"
                )
            (source / name).write_text(text)
        with _clock("compiling"):
            _pip(
                folder, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={scratch}", str(source), env=CHOICES
            )
        (wheel,) = Path(scratch).glob("horovod-*.whl")
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False) as partial:
            partial.write(wheel.read_bytes())
        return Path(partial.name).replace(folder / wheel.name)


@contextmanager
def _clock(what: str) -> Iterator[None]:
    """Shows on a terminal that something is under way."""
    with Console(stderr=True).status(f"{what} ..."):
        yield


def _pip(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run pip; what it says goes to a log in `folder` where it fails."""
    command: Sequence[str] = (sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)
    done = subprocess.run(command, env={**(env or {}), **os.environ}, capture_output=True, text=True)
    if done.returncode:
        said = done.stdout + done.stderr
        log = folder / "failed.log"
        log.write_text(said)
        raise ClusterError(f"pip {arguments[0]} failed ({reason_of(said)}): see {log}")


def reason_of(said: str) -> str:
    """The line of a failed build that says why."""
    found = next((match[0] for reason in REASONS if (match := re.search(reason, said))), "no reason given")
    return " ".join(found.split())
