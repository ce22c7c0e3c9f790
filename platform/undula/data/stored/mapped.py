"""Map of the samples of a stream. The columns of its results are fixed before the first window is read, and are the same in every process.

The first row of the data decides, and not the first row that a rank happens to read: that would depend on the world size and on the step
from which the run resumes.
"""

from functools import cached_property, lru_cache

import numpy as np
import pyarrow as pa

from undula.data.stored.manifest import Column
from undula.data.stored.maps import SampleFunction, SampleMap, result_columns
from undula.data.stored.reads import WindowRead, WindowReads
from undula.plan.order import RowRange, Window


class StreamMap:
    """Function that a stream applies to its samples.

    Args:
        function: Function applied to each sample when it is read.
        key: Key of the random generators for the first row.
        reads: Reads of the data set with the first row of the data.
    """

    def __init__(self, function: SampleFunction, key: int, reads: WindowReads):
        self._function = function
        self._key = key
        self._reads = reads

    def keyed(self, key: int, url: str) -> SampleMap:
        """Return the map of the data set at `url`, with its random generators keyed by `key`.

        Raises:
            ManifestError: The first row of the data cannot be read.
            UsageError: The function returns values for it that batches cannot hold.
        """
        return SampleMap(self._function, key, url, self._result)

    @cached_property
    def _result(self) -> tuple[Column, ...]:
        manifest = self._reads.manifest
        row_group = int(np.flatnonzero(manifest.row_counts)[0])
        window = Window(virtual_worker=0, start=0, ranges=(RowRange(row_group, 0, 1),), key=None)
        row = _row(self._reads.of(window))
        return result_columns(self._function, self._key, manifest.url, row, self._reads.columns)


@lru_cache(maxsize=8)
def _row(read: WindowRead) -> pa.Table:
    """Return the row that a read has. It is kept, because the next worker group of this process and each validation need it again."""
    return read()
