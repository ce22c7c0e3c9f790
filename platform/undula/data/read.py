"""Read tasks of Ray Data: each brings one shuffle window of one virtual worker, its rows in stream order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from undula.data.manifest import ID_COLUMN, Manifest
from undula.errors import ManifestError
from undula.plan.order import Window
from undula.storage import Store


@dataclass(frozen=True)
class PieceRead:
    """Rows [start, stop) of one row group of one file."""

    file: str
    row_group: int
    start: int
    stop: int
    first_id: int


@dataclass(frozen=True)
class WindowRead:
    """A read task: the rows of a window, in stream order, without the `skip` first ones."""

    url: str
    columns: tuple[str, ...]
    pieces: tuple[PieceRead, ...]
    window: Window
    skip: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        return self.window.num_rows - self.skip

    def ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Ids of the rows, in stream order; shape [num_rows]."""
        rows = [np.arange(piece.start, piece.stop) + piece.first_id for piece in self.pieces]
        return np.concatenate(rows)[self.window.permutation()[self.skip :]]

    def __call__(self) -> Iterable[pa.Table]:
        store = Store(self.url)
        tables = [self._read(store, piece) for piece in self.pieces]
        table = pa.concat_tables(tables)
        if self.window.key is not None:
            table = table.take(pa.array(self.window.permutation()[self.skip :]))
        elif self.skip:
            table = table.slice(self.skip)
        yield table.combine_chunks()

    def _read(self, store: Store, piece: PieceRead) -> pa.Table:
        try:
            with store.open(piece.file) as source:
                file = pq.ParquetFile(source, pre_buffer=True)
                table = file.read_row_group(piece.row_group, columns=list(self.columns), use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise ManifestError(f"{self.url}/{piece.file} cannot be read as its manifest says: {error}") from error
        table = table.slice(piece.start, piece.stop - piece.start)
        ids = np.arange(piece.start, piece.stop, dtype=np.int64) + piece.first_id
        return table.append_column(ID_COLUMN, pa.array(ids))


def window_read(manifest: Manifest, columns: tuple[str, ...], window: Window, position: int) -> WindowRead:
    """The read task for a window, from stream position `position` on where that lies within it."""
    pieces, num_bytes = [], 0
    for piece in window.pieces:
        number, group = manifest.row_group_places[piece.row_group]
        file = manifest.files[number]
        first_id = int(manifest.first_ids[piece.row_group])
        pieces.append(PieceRead(file.name, group, piece.start, piece.stop, first_id))
        num_bytes += file.row_group_bytes[group] * piece.num_rows // max(file.row_groups[group], 1)
    skip = max(position - window.start, 0)
    return WindowRead(manifest.url, columns, tuple(pieces), window, skip, num_bytes)


class WindowDatasource(Datasource):
    """A Ray Data source that brings the given windows, one block each, in the given order."""

    def __init__(self, reads: Sequence[WindowRead]):
        self._reads = tuple(reads)

    def get_name(self) -> str:
        return "Windows"

    def estimate_inmemory_data_size(self) -> int:
        return sum(read.num_bytes for read in self._reads)

    def get_read_tasks(self, parallelism: int, *args: object, **kwargs: object) -> list[ReadTask]:
        return [
            ReadTask(
                read,
                BlockMetadata(num_rows=read.num_rows, size_bytes=read.num_bytes, input_files=None, exec_stats=None),
            )
            for read in self._reads
        ]
