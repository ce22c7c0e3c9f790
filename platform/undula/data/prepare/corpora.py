"""Small data sets to get started with: Python's standard library as text, scikit-learn's digits and CIFAR-10.

Each function inspects its source and returns a Corpus of known size. Nothing is written until `Corpus.write`.
"""

import re
import sysconfig
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from undula.data.prepare.write import ROW_GROUP_BYTES, array_column, array_field, check_sizes, clear, write_shards
from undula.data.stored.manifest import load_manifest
from undula.errors import ManifestError, StorageError, UndulaError
from undula.plan.keys import key64
from undula.storage import open_store

SPLITS = ("train", "validation")
_BATCH_BYTES = 2**20


@dataclass(frozen=True)
class Split:
    """Rows of one data set of a corpus."""

    num_rows: int
    rows: Callable[[], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class Corpus:
    """A training and a validation data set with the same schema."""

    schema: pa.Schema
    train: Split
    validation: Split

    @property
    def num_rows(self) -> int:
        """Number of rows of both data sets, which is also the total that `write` reports to `advance`."""
        return self.train.num_rows + self.validation.num_rows

    def write(
        self,
        out_url: str,
        num_shards: int = 4,
        row_group_bytes: int = ROW_GROUP_BYTES,
        advance: Callable[[int], None] = lambda rows: None,
    ) -> None:
        """Write `<out_url>/train` and `<out_url>/validation`, replacing the data sets of an earlier `write`."""
        out = open_store(out_url)
        check_sizes(out, min(self.train.num_rows, self.validation.num_rows), num_shards, row_group_bytes)
        for name in SPLITS:
            clear(out / name)
        for name, split in zip(SPLITS, (self.train, self.validation), strict=True):
            write_shards(out / name, split.rows(), self.schema, split.num_rows, num_shards, row_group_bytes, advance)


def is_complete(out_url: str) -> bool:
    """Return whether `out_url` has both data sets of a corpus and their files match the manifests."""
    try:
        for name in SPLITS:
            load_manifest((open_store(out_url) / name).url).check_files()
    except ManifestError:
        return False
    return True


def stdlib_text(context: int = 256, root: Path | None = None) -> Corpus:
    """Return Python source code as bytes: the standard library of this interpreter, with 1 in 20 files held out by name.

    The column `text` has type uint8 [context + 1]. Its samples are consecutive parts of all files, joined with a zero byte in between.

    Args:
        context: Number of tokens that a model sees at once; a sample has one more token, the last target.
        root: Folder of .py files; by default the standard library.

    Raises:
        UndulaError: `context` is less than 1.
    """
    if context < 1:
        raise UndulaError(f"context is {context}; set it to at least 1")
    field = array_field("text", pa.uint8(), (context + 1,))
    schema = pa.schema([field])
    held_out: dict[bool, list[Path]] = {True: [], False: []}
    for relative, file in _python_files(root or Path(sysconfig.get_path("stdlib"))):
        held_out[key64("validation", relative) % 20 == 0].append(file)

    def split(files: list[Path]) -> Split:
        num_bytes = sum(file.stat().st_size + 1 for file in files) - 1
        return Split(max(num_bytes, 0) // (context + 1), lambda: _text_rows(files, schema, context + 1))

    return Corpus(schema, train=split(held_out[False]), validation=split(held_out[True]))


def digits() -> Corpus:
    """Return scikit-learn's 1797 handwritten digits, with about a fifth held out by sample number.

    The columns are `image`, uint8 [1, 8, 8], and `label`, int64.

    Raises:
        UndulaError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UndulaError(
            "the digits data set is part of scikit-learn, which is not installed; run pip install scikit-learn"
        ) from error
    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # [samples, 8, 8], scaled from 0..16 to 0..255
    labels = bunch.target.astype(np.int64)
    held_out = np.array([key64("validation", number) % 5 == 0 for number in range(len(labels))])
    schema = _image_schema((1, 8, 8))

    def split(chosen: NDArray[np.bool_]) -> Split:
        return Split(int(chosen.sum()), lambda: iter([_image_batch(schema, images[chosen], labels[chosen])]))

    return Corpus(schema, train=split(~held_out), validation=split(held_out))


def cifar10(archive: Path) -> Corpus:
    """Return CIFAR-10 from its binary archive, cifar-10-binary.tar.gz, with the test batch held out.

    The columns are `image`, uint8 [3, 32, 32], and `label`, int64. The Python archive is refused because its members are pickles, and
    reading a pickle can run code.

    Raises:
        StorageError: The file is not the binary archive, or is damaged.
    """
    with _reading(archive), tarfile.open(archive) as tar:
        members = {PurePosixPath(member.name).name: member for member in tar if member.isfile()}
    if "data_batch_1" in members:
        raise StorageError(
            f"{archive} contains pickles, which can run code when they are read; use cifar-10-binary.tar.gz, "
            "the binary version from the same page"
        )
    train = sorted(name for name in members if re.fullmatch(r"data_batch_\d+\.bin", name))
    validation = [name for name in members if name == "test_batch.bin"]
    if not (train and validation):
        raise StorageError(f"{archive} has no data_batch_*.bin or no test_batch.bin; use cifar-10-binary.tar.gz")
    for name in (*train, *validation):
        if members[name].size % _CIFAR_RECORD_BYTES:
            raise StorageError(
                f"{name} in {archive} has {members[name].size} bytes, which is not a multiple of {_CIFAR_RECORD_BYTES}; "
                "download the archive again"
            )
    schema = _image_schema((3, 32, 32))

    def split(names: list[str]) -> Split:
        chosen = [members[name].name for name in names]
        num_rows = sum(members[name].size for name in names) // _CIFAR_RECORD_BYTES
        return Split(num_rows, lambda: _cifar_rows(archive, chosen, schema))

    return Corpus(schema, train=split(train), validation=split(validation))


_CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32


def _python_files(root: Path) -> list[tuple[str, Path]]:
    """List the .py files of a source tree, without installed packages, as sorted pairs (path relative to `root`, file)."""
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    with _reading(root):
        files = [(file.relative_to(root), file) for file in root.rglob("*.py") if file.is_file()]
    return sorted((path.as_posix(), file) for path, file in files if not skipped & set(path.parts))


def _text_rows(files: list[Path], schema: pa.Schema, width: int) -> Iterator[pa.RecordBatch]:
    pending = bytearray()
    for number, file in enumerate(files):
        if number:
            pending += b"\0"
        with _reading(file):
            pending += file.read_bytes()
        if len(pending) >= max(_BATCH_BYTES, width) or number == len(files) - 1:
            whole = len(pending) // width * width
            values = np.frombuffer(bytes(pending[:whole]), dtype=np.uint8)
            del pending[:whole]
            yield pa.record_batch([array_column(schema.field("text"), values)], schema=schema)


def _cifar_rows(archive: Path, members: list[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    most_bytes = _BATCH_BYTES // _CIFAR_RECORD_BYTES * _CIFAR_RECORD_BYTES
    with _reading(archive), tarfile.open(archive) as tar:
        for name in members:
            file = tar.extractfile(name)
            assert file is not None, "cifar10() chose regular files"
            while data := file.read(most_bytes):
                records = np.frombuffer(data, dtype=np.uint8).reshape(-1, _CIFAR_RECORD_BYTES)
                labels = records[:, 0].astype(np.int64)
                if labels.max() > 9:
                    raise StorageError(
                        f"{name} in {archive} has a label {labels.max()}, but CIFAR-10's labels are 0 to 9; use cifar-10-binary.tar.gz"
                    )
                yield _image_batch(schema, records[:, 1:], labels)


def _image_schema(shape: tuple[int, ...]) -> pa.Schema:
    return pa.schema([array_field("image", pa.uint8(), shape), pa.field("label", pa.int64(), nullable=False)])


def _image_batch(schema: pa.Schema, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> pa.RecordBatch:
    return pa.record_batch([array_column(schema.field("image"), images), pa.array(labels)], schema=schema)


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        detail = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise StorageError(f"cannot read {source}: {detail}") from error
