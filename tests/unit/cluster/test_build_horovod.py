"""Tests of building Horovod: the patch applies or is refused, and a failure has a reason. `make horovod` tests the build itself."""

import re
import shutil
from pathlib import Path

import pytest

from undula.cluster import build_horovod
from undula.cluster.build_horovod import PATCH, PATCH_COMMANDS, apply_patch, build_name, failure_reason
from undula.errors import ClusterError

CXX_STANDARD = "set(CMAKE_CXX_STANDARD 17)"


def write_source(folder: Path) -> None:
    """Write the files that the patch changes: the lines that it expects, at their line numbers, and empty lines elsewhere."""
    for name, hunks in re.findall(r"(?ms)^--- a/(\S+)\n\+\+\+ b/\S+\n(.*?)(?=^--- a/|\Z)", PATCH.read_text()):
        lines: list[str] = []
        for start, hunk in re.findall(r"(?ms)^@@ -(\d+),\d+ \+\S+ @@\n(.*?)(?=^@@|\Z)", hunks):
            lines += [""] * (int(start) - 1 - len(lines))
            lines += [line[1:] for line in hunk.splitlines() if not line.startswith("+")]
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(lines) + "\n")


@pytest.fixture(params=PATCH_COMMANDS, ids=lambda command: command[0])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Source of Horovod, to which only one of the commands can apply the patch."""
    if not shutil.which(request.param[0]):
        pytest.skip(f"{request.param[0]} is not installed")
    monkeypatch.setattr(build_horovod, "PATCH_COMMANDS", (request.param,))
    write_source(tmp_path)
    return tmp_path


def test_the_patch_applies_with_each_command(source: Path) -> None:
    apply_patch(source)
    changed = {file.name: file.read_text() for file in source.rglob("*.cc")}
    assert "iface = global_context.gloo_iface_;" in changed["gloo_context.cc"]
    assert "} else if (fixed_values_.find(variable) ==" in changed["parameter_manager.cc"]
    assert CXX_STANDARD in (source / "CMakeLists.txt").read_text()
    assert CXX_STANDARD in (source / "horovod" / "torch" / "CMakeLists.txt").read_text()


def test_another_source_is_refused_in_one_sentence(source: Path) -> None:
    changed = source / "horovod" / "torch" / "CMakeLists.txt"
    changed.write_text(changed.read_text().replace("CXX_STANDARD 14", "CXX_STANDARD 20"))
    with pytest.raises(ClusterError, match=r"^horovod-0\.28\.1\.patch does not apply to .*CMakeLists\.txt.*pypi\.org"):
        apply_patch(source)


def test_the_patch_applies_inside_a_git_repository(tmp_path: Path) -> None:
    """In a repository, `git apply` silently skips files if it takes the paths of the patch as relative to the root."""
    (tmp_path / ".git" / "refs").mkdir(parents=True)
    (tmp_path / ".git" / "objects").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    source = tmp_path / "source"
    write_source(source)
    apply_patch(source)
    assert CXX_STANDARD in (source / "CMakeLists.txt").read_text()


def test_builds_with_another_patch_or_other_choices_have_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {build_name({}), build_name({"HOROVOD_GPU_OPERATIONS": "NCCL"})}
    other = tmp_path / "other.patch"
    other.write_bytes(PATCH.read_bytes() + b"\n")
    monkeypatch.setattr(build_horovod, "PATCH", other)
    names.add(build_name({}))
    assert len(names) == 3


def test_missing_tools_are_named_before_anything_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/sh -O2")  # any program that exists
    with pytest.raises(ClusterError, match="needs CMake and make and git or patch, which this machine lacks"):
        build_horovod.build_horovod(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("Building wheel for horovod: finished with status 'error'\nx.cc:1:10: fatal error: Python.h: No such file\n",
         "fatal error: Python.h: No such file"),
        ("CMake Error at CMakeLists.txt:9 (find_package):\n  Could not find NCCL\n\nERROR: Failed building wheel",
         "CMake Error at CMakeLists.txt:9 (find_package): Could not find NCCL"),
        ("ERROR: Could not find a version that satisfies", "ERROR: Could not find a version that satisfies"),
        ("error: subprocess-exited-with-error\n\n      error: invalid command 'bdist_wheel'\n      [end of output]\n",
         "error: invalid command 'bdist_wheel'"),
        ("", "no reason given"),
    ],
)  # fmt: skip
def test_the_reason_of_a_failed_build_is_the_log_line_that_explains_it(log: str, reason: str) -> None:
    assert failure_reason(log) == reason
