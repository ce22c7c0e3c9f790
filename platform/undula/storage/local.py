"""Files on a disk. A file is written beside its place and then moved there."""

import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path


def create_file(path: Path, data: bytes) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("xb")
    except FileExistsError:
        return False
    with file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return True


def delete_file(path: Path) -> None:
    def ignore_if_gone(function: object, name: str, error: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    if path.is_dir():
        shutil.rmtree(path, onerror=ignore_if_gone)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def replace_file(path: Path, buffers: Sequence[bytes | memoryview]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            for buffer in buffers:
                file.write(buffer)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def files_below(
    folder: Path,
    name: str = "",
    above: frozenset[tuple[int, int]] = frozenset(),
    unreadable: list[str] | None = None,
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and the state of each whole file below a folder. Files and folders may disappear meanwhile.

    Links to files and folders are followed, but not those to a folder that the link lies in, because they have no end.

    Args:
        folder: Path of the folder.
        name: Name of the folder, which the names of its files begin with.
        above: Device and inode of each folder above this one.
        unreadable: List to which the names of inner folders that are not readable are added; None to raise an exception.
    """
    try:
        state = folder.stat()
        with os.scandir(folder) as scanned:
            entries = list(scanned)
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError as error:
        if name and unreadable is not None:
            unreadable.append(name)
            return
        raise PermissionError(f"{folder} is not readable") from error
    if (state.st_dev, state.st_ino) in above:
        return
    for entry in entries:
        inner = f"{name}/{entry.name}" if name else entry.name
        if entry.is_dir():
            yield from files_below(folder / entry.name, inner, above | {(state.st_dev, state.st_ino)}, unreadable)
        elif not entry.name.endswith(".partial") and (state_of := file_state(folder / entry.name)):
            yield inner, state_of


def file_state(path: Path) -> os.stat_result | None:
    """Return the state of a file; None if it does not exist or is not a file."""
    try:
        state = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return state if stat.S_ISREG(state.st_mode) else None
