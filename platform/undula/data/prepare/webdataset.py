"""Reading of WebDataset tars. The members of a sample follow one another and share the name up to the first dot of the file name."""

import tarfile
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from undula.errors import ManifestError
from undula.storage import Store

BATCH_SAMPLES = 256
"""Maximum number of samples in one table."""
BATCH_BYTES = 64 * 2**20
"""Size in bytes of the members at which a table ends."""
KEY = "key"
"""Column of the name that the members of a sample share."""

Sample = dict[str, Any]


def samples_in_tables(store: Store, names: tuple[str, ...]) -> Iterator[pa.Table]:
    """Yield the samples of the archives as tables. The first table has all columns.

    The rest of a member's name, in lower case and with `_` for each dot, is its column. Members without an extension, and hidden ones,
    are left out, as the webdataset package does.

    Raises:
        ManifestError: An archive is damaged, a sample has two members for a column, or one that the first samples do not have.
    """
    columns: dict[str, None] = {}
    for batch in _batches(_samples(store, names)):
        first = {column: sample[KEY] for sample in reversed(batch) for column in sample}
        new = [column for column in first if column not in columns]
        if columns and new:
            raise ManifestError(
                f"sample {first[new[0]]!r} of {store.url} has a member {new[0]!r}, which none of the first "
                f"{BATCH_SAMPLES} samples has; give every sample the same members"
            )
        columns = columns or {column: None for sample in batch for column in sample}
        yield pa.table({column: [sample.get(column) for sample in batch] for column in columns})


def _batches(samples: Iterator[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    num_bytes = 0
    for sample in samples:
        batch.append(sample)
        num_bytes += sum(len(value) for value in sample.values() if isinstance(value, (bytes, str)))
        if len(batch) == BATCH_SAMPLES or num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _samples(store: Store, names: tuple[str, ...]) -> Iterator[Sample]:
    for name in names:
        sample: Sample = {}
        for member, data in _members(store, name):
            folder, _, base = member.rpartition("/")
            stem, dot, extensions = base.partition(".")
            if not (stem and dot):
                continue
            key, column = f"{folder}/{stem}" if folder else stem, extensions.lower().replace(".", "_")
            if sample and sample[KEY] != key:
                yield sample
                sample = {}
            if column == KEY or column in sample:
                problem = "which is the name of the sample's own column" if column == KEY else "which it already has"
                raise ManifestError(
                    f"{store.url}/{name} has a member {member!r} for the column {column!r}, {problem}; rename it"
                )
            sample |= {column: _value(f"{store.url}/{name}: {member}", data), KEY: key}
        if sample:
            yield sample


def _members(store: Store, name: str) -> Iterator[tuple[str, bytes]]:
    try:
        with store.open(name) as raw, tarfile.open(fileobj=raw, mode="r|*") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield member.name.removeprefix("./"), content.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ManifestError(f"{store.url}/{name} is not an intact tar archive: {error}; restore it") from error


def _value(member: str, data: bytes) -> bytes | int | str:
    """Decode a member by its file extension: an int for class labels, a str for text, otherwise bytes."""
    extension = member.rpartition(".")[2].lower()
    try:
        if extension in ("cls", "index"):
            number = int(data)
            if not -(2**63) <= number < 2**63:
                raise ValueError(f"{number} does not fit in 64 bits")
            return number
        return data.decode() if extension in ("txt", "text", "json") else data
    except ValueError as error:
        raise ManifestError(f"the content of {member} does not match its file extension: {error}") from error
