"""Arrow's view of S3: a file system whose requests are those of this package. Arrow's own resolves credentials and proxy differently."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import fs

from undula.storage.retries import MissingError, named_errors
from undula.storage.s3_files import S3File, S3Output
from undula.storage.s3_requests import PART_BYTES, Object, split_path


def s3_filesystem(anonymous: bool = False) -> fs.FileSystem:
    """Return a file system whose paths are `bucket/key`. It can be sent to other processes."""
    return fs.PyFileSystem(S3Handler(anonymous))


class S3Handler(fs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """Operations of Arrow on S3, where a folder exists as long as there are objects below it."""

    def __init__(self, anonymous: bool):
        self.anonymous = anonymous

    def __eq__(self, other: object) -> bool:
        return isinstance(other, S3Handler) and other.anonymous == self.anonymous

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.anonymous)

    def get_type_name(self) -> str:
        return "undula-s3"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [self._info(path) for path in paths]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        bucket, folder = split_path(selector.base_dir.removesuffix("/"), self.anonymous)
        prefix = f"{folder}/" if folder else ""
        with named_errors("list", f"s3://{selector.base_dir}"):
            objects = [entry for entry in bucket.list(prefix) if entry.key != prefix]
        if not objects and not selector.allow_not_found:
            raise FileNotFoundError(f"s3://{selector.base_dir} does not exist")
        infos = {info.path: info for entry in objects for info in _with_folders(bucket.name, prefix, entry)}
        return [
            info
            for info in infos.values()
            if selector.recursive or "/" not in info.path[len(bucket.name) + 1 + len(prefix) :]
        ]

    def create_dir(self, path: str, recursive: bool) -> None:
        """Do nothing, because folders on S3 need no object of their own."""

    def delete_dir(self, path: str) -> None:
        bucket, key = split_path(path.removesuffix("/"), self.anonymous)
        with named_errors("delete", f"s3://{path}"):
            bucket.delete_below(f"{key}/")

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self.delete_dir(path)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError("all buckets of an account are not deleted")

    def delete_file(self, path: str) -> None:
        bucket, key = split_path(path, self.anonymous)
        with named_errors("delete", f"s3://{path}"):
            bucket.delete(key)

    def move(self, src: str, dest: str) -> None:
        self.copy_file(src, dest)
        self.delete_file(src)

    def copy_file(self, src: str, dest: str) -> None:
        source, target = self._file(src), self._output(dest)
        while chunk := source.read(PART_BYTES):
            target.write(chunk)
        target.close()

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self._file(path), mode="r")

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        return pa.PythonFile(self._output(path), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        raise NotImplementedError("objects on S3 cannot be appended to")

    def _file(self, path: str) -> S3File:
        try:
            with named_errors("read", f"s3://{path}"):
                return S3File(*split_path(path, self.anonymous))
        except Exception as error:
            if isinstance(error.__cause__, MissingError):
                raise FileNotFoundError(str(error.__cause__)) from error
            raise

    def _output(self, path: str) -> S3Output:
        return S3Output(*split_path(path, self.anonymous))

    def _info(self, path: str) -> fs.FileInfo:
        bucket, key = split_path(path.removesuffix("/"), self.anonymous)
        with named_errors("read", f"s3://{path}"):
            if key and (head := bucket.head(key)):
                return fs.FileInfo(path, fs.FileType.File, size=head.bytes)
            is_folder = bucket.has_any(f"{key}/" if key else "")
        return fs.FileInfo(path, fs.FileType.Directory if is_folder else fs.FileType.NotFound)


def _with_folders(bucket: str, prefix: str, entry: Object) -> Iterator[fs.FileInfo]:
    """Yield an object below a prefix and the folders between them."""
    place = entry.key.find("/", len(prefix))
    while place >= 0:
        yield fs.FileInfo(f"{bucket}/{entry.key[:place]}", fs.FileType.Directory)
        place = entry.key.find("/", place + 1)
    if not entry.key.endswith("/"):
        yield fs.FileInfo(f"{bucket}/{entry.key}", fs.FileType.File, size=entry.bytes)
