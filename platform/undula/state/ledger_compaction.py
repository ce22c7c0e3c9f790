"""Compaction of a ledger: many small files are merged into one from time to time, so that a long run is read in seconds.

The merged file is written before its sources are deleted, and readers count a row once, in however many files it is. So an interruption
at any moment leaves all rows, and two processes that merge the same files at once do no harm.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex

import pyarrow as pa

from undula.state.ledger_files import KINDS, LEDGER, READERS, Kind, read_each, to_bytes, union
from undula.storage import Entry, Store

TIERS_BYTES = (64 * 2**10, 2**20, 16 * 2**20)
"""Limits of the sizes of files in bytes, by tier. Only files of the same tier are merged, and none that is larger than the last limit, so
that a row is copied a few times at most."""
FILES_PER_TIER = 16
"""Number of files of a tier from which on they are merged."""
MOST_SOURCES = 512
"""Maximum number of files that are merged at once."""


def due_merge(files: Sequence[Entry]) -> tuple[str, ...]:
    """Return the names of the files of one kind that are to be merged now, smallest first; empty if there are few files.

    They are those of the lowest tier that has many files, up to a total of the last limit of TIERS_BYTES.
    """
    lower = 0
    for upper in TIERS_BYTES:
        tier = sorted((file.bytes, file.name) for file in files if lower <= file.bytes < upper)
        lower = upper
        if len(tier) < FILES_PER_TIER:
            continue
        sources: list[str] = []
        total = 0
        for num_bytes, name in tier[:MOST_SOURCES]:
            if len(sources) >= 2 and total >= TIERS_BYTES[-1]:
                break
            sources.append(name)
            total += num_bytes
        return tuple(sources)
    return ()


def compact(store: Store) -> bool:
    """Merge files of the ledger of a run if there are many.

    Args:
        store: Run directory.

    Returns:
        Whether files were merged. There may be more to merge then.

    Raises:
        StorageError: The storage failed. No row is lost.
    """
    entries = store.list(LEDGER)
    files = [Entry(entry.name.removeprefix(f"{LEDGER}/"), entry.bytes, entry.version) for entry in entries]
    merged = False
    for kind in KINDS:
        own = [file for file in files if kind.includes(file.name)]
        if sources := due_merge(own):
            number = 1 + max((_number(kind, file.name) for file in own), default=0)
            merged |= _merge(store, kind, sources, number)
    return merged


def _merge(store: Store, kind: Kind, sources: Sequence[str], number: int) -> bool:
    """Merge files into one that has a number. Those that cannot be read, or are gone, are left alone."""
    results = read_each(store, sorted(sources))
    tables = {name: result for name, result in results.items() if isinstance(result, pa.Table)}
    if len(tables) < 2:
        return False
    # The token keeps two processes that choose the same number from writing the same file.
    name = f"{kind.name}-merged-{number:08d}-{token_hex(8)}.parquet"
    store.write(f"{LEDGER}/{name}", to_bytes(union(kind, tables.values())))
    with ThreadPoolExecutor(READERS, thread_name_prefix="undula-ledger-delete") as threads:
        list(threads.map(lambda source: store.delete(f"{LEDGER}/{source}"), tables))
    return True


def _number(kind: Kind, name: str) -> int:
    """Return the number of a merged file; 0 for a plain file."""
    number = name.removeprefix(f"{kind.name}-merged-").partition("-")[0]
    return int(number) if name.startswith(f"{kind.name}-merged-") and number.isdecimal() else 0
