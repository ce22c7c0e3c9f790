"""Reader of micro-batches of a dataset of the script."""

import numpy as np

from undula.data.reader import Samples
from undula.data.script.items import Items, Purpose, any_request, kept_generators, requests
from undula.data.script.loader_processes import Loader
from undula.errors import UsageError
from undula.plan.plan import Plan


class ScriptReader:
    """Micro-batches of a rank's virtual workers from step `start` on, in the order in which the plan's steps take them.

    Args:
        items: Dataset of micro-batches.
        loader: Loader of the micro-batches.
        plan: Plan of the samples.
        virtual_workers: Virtual workers of the rank.
        start: First step.
        purpose: Use of the samples, by which their random numbers are keyed.
        world_size: Number of workers, by which steps are merged.
    """

    def __init__(
        self,
        items: Items,
        loader: Loader,
        plan: Plan,
        virtual_workers: range,
        start: int,
        purpose: Purpose,
        world_size: int = 1,
    ):
        self._items = items
        self._loader = loader
        self._num_samples = plan.num_rows
        self._requests = requests(plan, virtual_workers, start, purpose, world_size)
        self._is_open = self._has_begun = False

    def open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._loader.begin(self._items, self._requests)

    def take(self, virtual_worker: int, count: int) -> Samples:
        if len(self._items) != self._num_samples:
            raise UsageError(
                f"the dataset has {len(self._items)} samples now, but had {self._num_samples} when the run began, by which it is planned; "
                "keep the length, for example by drawing as many samples for each epoch"
            )
        if self._is_open and (not self._has_begun or self._loader.begins_epoch):
            self._loader.renew()  # the script may have changed the dataset, as with `dataset.set_epoch(epoch)`
        self.open()
        self._has_begun = True
        request, batch = self._loader.next()
        assert len(request.ids) == count, f"virtual worker {virtual_worker} takes {count}, {len(request.ids)} are next"
        return Samples(request.ids, batch)

    def any_rows(self, count: int) -> Samples:
        ids = np.arange(count, dtype=np.int64) % len(self._items)
        with kept_generators():
            return Samples(ids, self._loader.load_here(self._items, any_request(ids)))

    def close(self) -> None:
        """Do nothing: the loader is for the next reader, too."""
