"""Working directory of a worker: that of the driver where the worker sees it, and otherwise one of its own, whose files reach the run."""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from undula.state.directory import FILES
from undula.state.processes import own_identity
from undula.storage import Store

Versions = Mapping[str, tuple[int, int]]
"""Size in bytes and time of the last change in ns of files, by path relative to a folder."""
COPIES = "working_dir_files"
"""Name of the folder in which Ray keeps the copies of working directories (ray/_private/runtime_env/working_dir.py)."""
_thread = ThreadPoolExecutor(1, "undula-files")
PREFIX, LOCK = "undula-files-", ".lock"
"""Beginning of the names of working directories in the node's folder for temporary files, and end of the name of the file beside each."""
_held: list[int] = []
"""Descriptors of locked files."""
_here: "WorkFolder | None" = None


@dataclass(frozen=True)
class Origin:
    """Working directory of the driver, and what a process needs to know whether it sees the same one."""

    folder: str
    machine: str
    """Machine and process namespace of the driver."""
    script: str
    identity: tuple[int, int]
    """Number of the script's inode and the time of its last change, which no copy of the file has, but each mount of its file system."""

    @classmethod
    def of_this_process(cls, script: Path) -> "Origin":
        """Return the working directory of this process, which is the driver."""
        return cls(str(Path.cwd()), own_identity().namespace, str(script), _identity(script))

    def is_here(self) -> bool:
        """Return whether this process sees the driver's files."""
        folder = Path(self.folder)
        if is_of_ray(folder) or not folder.is_dir():  # what a script writes to a copy of Ray's ends with the job
            return False
        if self.machine and self.machine == own_identity().namespace:
            return True
        try:
            return _identity(Path(self.script)) == self.identity
        except OSError:
            return False


@dataclass
class WorkFolder:
    """Working directory of a worker that does not see the driver's. What rank 0 writes there is brought to the run directory.

    Args:
        path: The working directory.
        before: Files that the script has not written.
    """

    path: Path
    before: Versions
    _brought: dict[str, tuple[int, int]] = field(default_factory=dict)
    _is_newest: bool = False
    """Whether this process has written the newest files of the run."""
    _bringing: "Future[None] | None" = None

    def begin(self, store: Store, is_first: bool) -> None:
        """Begin a group. Rank 0 fetches what another process has brought to the run directory."""
        if is_first and not self._is_newest:
            for entry in (store / FILES).list():
                file = self.path / entry.name
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as target:
                    for chunk in (store / FILES).read_chunks(entry.name):
                        target.write(chunk)
            self._brought = {}
        self._is_newest = is_first

    def bring_along(self, store: Store) -> None:
        """Begin to bring what was written to the run directory, unless this process still does so. The next call repeats what fails."""
        if self._bringing is None or self._bringing.done():
            self._bringing = _thread.submit(self._bring, store)

    def bring(self, store: Store) -> None:
        """Bring what was written to the run directory.

        Raises:
            StorageError: A file could not be written there.
        """
        if self._bringing is not None:
            wait([self._bringing])
        self._bring(store)

    def _bring(self, store: Store) -> None:
        for name, version in versions(self.path).items():
            if version not in (self.before.get(name), self._brought.get(name)):
                with suppress(FileNotFoundError):
                    (store / FILES).write(name, (self.path / name).read_bytes())
                    self._brought[name] = version


def is_of_ray(folder: Path) -> bool:
    """Return whether a folder is a copy of a job's files that Ray has made, or lies in one."""
    return COPIES in folder.parts


def work_in(folder: WorkFolder) -> None:
    """Enter a working directory."""
    global _here
    _here = folder
    os.chdir(folder.path)


def work_folder() -> WorkFolder | None:
    """Return the working directory of this process; None if it is the driver's, or if this process executes no script."""
    return _here


def versions(folder: Path) -> Versions:
    """Return the versions of the files in a folder, without links and without `__pycache__`."""
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for file in (Path(place, name) for name in names):
            with suppress(FileNotFoundError):  # the script may remove what it has written
                state = file.lstat()
                if stat.S_ISREG(state.st_mode):
                    found[str(file.relative_to(folder))] = (state.st_size, state.st_mtime_ns)
    return found


def own_folder(token: str, files: Path, links: bool = False) -> Path:
    """Return a working directory for the workers of a run on this node, which other runs with the same files do not change.

    It stays as long as a process uses it. Whoever makes the next one on the node removes those that no process uses.

    Args:
        token: Text that no other submission has.
        files: Folder with files that the script may read.
        links: Whether to link these files instead of copying them, because they may be many.
    """
    own = Path(tempfile.gettempdir(), f"{PREFIX}{token}")
    _hold(own)
    _remove_unused(own.parent)
    if not own.exists():
        part = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{token}-"))
        if links:
            link_files(files, part)
        else:
            shutil.copytree(files, part, symlinks=True, dirs_exist_ok=True)
        try:
            part.rename(own)
        except OSError:  # another worker was faster
            shutil.rmtree(part)
    return own


def link_files(source: Path, target: Path) -> None:
    """Link each file and folder of a folder, if there is one, from another folder that has nothing of that name."""
    for entry in source.iterdir() if source.is_dir() else ():
        if not (target / entry.name).exists():
            (target / entry.name).symlink_to(entry)


def _hold(own: Path) -> None:
    """Mark a folder as used until this process ends, by a shared lock on the file beside it."""
    file = os.open(f"{own}{LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(file, fcntl.LOCK_SH)
    _held.append(file)


def _remove_unused(folder: Path) -> None:
    for lock in folder.glob(f"{PREFIX}*{LOCK}"):
        with suppress(OSError), lock.open("rb") as file:  # it may be another user's, or in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.unlink()
            for copy in folder.glob(f"{lock.name.removesuffix(LOCK)}*"):
                shutil.rmtree(copy, ignore_errors=True)


def _identity(file: Path) -> tuple[int, int]:
    state = file.stat()
    return state.st_ino, state.st_ctime_ns
