"""Steps that a group repeats after a lost worker or a resume: their losses are those of before, or something has begun anew.

What a script keeps in other places than the run's state begins anew in each group: random numbers of its own, counts, averages, what its
dataset or its optimizer has in attributes. Where steps are repeated, this shows, whatever it is.
"""

import threading
from contextlib import suppress
from struct import pack

import pyarrow.compute as pc

from undula.errors import StorageError
from undula.state.attempts import Lineage
from undula.state.ledger_files import LEDGER, STEPS, read_each
from undula.state.records import StepRow
from undula.storage import Store

COLUMNS = "attempt", "step", "loss"
MOST_BYTES = 32 * 2**20
"""Maximum size of the files of the ledger that are read for the comparison, the newest of them."""
MOST_WAITING = 1000
"""Maximum number of steps that wait for the losses of before, after which they are not compared."""
READING_S = 5.0
"""Maximum time in seconds for which the end of a run waits for these losses."""


class RepeatedSteps:
    """Compares the losses of an attempt's steps with those that the ledger has of the same steps, from earlier attempts.

    A thread reads the ledger, so that no step waits for it.

    Args:
        store: Run directory.
        before: Earlier attempts of the run.
        start: Number of steps with which it begins.
    """

    def __init__(self, store: Store, before: Lineage, start: int):
        self._store, self._before, self._start = store, before, start
        self._own: list[StepRow] = []
        """Steps that wait for the comparison."""
        self._former: dict[int, float] | None = None
        """Loss of each step of earlier attempts from `start` on; None until they are read."""
        self._reader = threading.Thread(target=self._read, name="undula-repeated", daemon=True)
        self._reader.start()

    def difference(self, row: StepRow) -> str | None:
        """Return how a step of this attempt differs from the same one of before, given the next step; None if none is known to differ."""
        self._own.append(row)
        if len(self._own) > MOST_WAITING:
            self._own, self._former = [], {}
        return self._compared()

    def last_difference(self) -> str | None:
        """Return the same at the end of the run."""
        self._reader.join(READING_S)
        return self._compared()

    def _compared(self) -> str | None:
        former = self._former
        if former is None:
            return None
        waiting, self._own = self._own, []
        for each in waiting:
            before = former.pop(each.step, None)
            if before is not None and pack("<d", before) != pack("<d", each.loss):
                former.clear()  # one sentence is enough
                return f"step {each.step} had the loss {before:.9g}, and has {each.loss:.9g} now"
        return None

    def _read(self) -> None:
        former: dict[int, tuple[int, float]] = {}
        with suppress(StorageError):
            files = [entry for entry in self._store.list(LEDGER) if STEPS.includes(entry.name.rpartition("/")[2])]
            room = MOST_BYTES
            for entry in sorted(files, key=lambda entry: entry.name, reverse=True):
                room -= entry.bytes
                if room < 0:
                    break
                (rows,) = read_each(self._store, [entry.name.rpartition("/")[2]]).values()
                if isinstance(rows, StorageError):  # it was merged into another file meanwhile
                    continue
                later = rows.filter(pc.field("step") >= self._start)
                for attempt, step, loss in zip(*(later[name].to_pylist() for name in COLUMNS), strict=True):
                    if attempt <= self._before.newest and self._before.includes(attempt):
                        former[step] = max(former.get(step, (attempt, loss)), (attempt, loss))
        self._former = {step: loss for step, (_, loss) in former.items()}
