"""Evaluation on several ranks in the order of the dataset, so that what is computed from it does not depend on the world size."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from undula.data.script.dataset import IndexedDataset
from undula.data.script.items import Collate, Items, Request
from undula.data.script.loader_processes import Loader
from undula.plan.keys import key64, subkeys
from undula.train.randomness import seed_validation
from undula.train.run import Run


def kept_loader(run: Run, name: str, num_workers: int) -> Loader:
    """Return the loader of the evaluation dataset with a name, whose processes are there for the next evaluation and the next group."""
    return run.keep(f"evaluation loader {name}", lambda: Loader(num_workers), Loader.close)


class RankBatches:
    """Batches of a dataset in its order, of which each rank evaluates its share: in round r, the k-th of W ranks has batch r * W + k.

    A rank for which the last round has no batch evaluates the last one again, and what it contributes is dropped.

    Args:
        run: The run.
        dataset: Dataset with a length.
        collate_fn: Function that makes a batch of a list of samples.
        batch_size: Number of samples in a batch.
        loader: Loader of the batches. Its processes keep the dataset, so it is for this dataset only.
    """

    def __init__(self, run: Run, dataset: IndexedDataset, collate_fn: Collate, batch_size: int, loader: Loader):
        self.dataset = dataset
        self.batch_size = batch_size
        self._run = run
        self._collate = collate_fn
        self._loader = loader
        self._sizes: list[int] = []
        """Number of samples of each rank in the current round; 0 for a rank without a batch."""

    def __len__(self) -> int:
        """Return the number of rounds."""
        return -(-self._num_batches // self._run.world_size)

    @property
    def _num_batches(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Yield a batch of this rank in each round. All ranks iterate together."""
        numbers = [[self._number(start, rank) for rank in range(self._run.world_size)] for start in range(len(self))]
        try:
            self._loader.begin(
                Items(self.dataset, self._collate), (self._request(each[self._run.rank]) for each in numbers)
            )
            for each in numbers:
                self._run.alive()
                _, batch = self._loader.next()
                self._sizes = [self._size(number) for number in each]
                seed_validation(self._run.plan.spec.seed, 0, 0, self._batch_of(each[self._run.rank]))
                yield batch
        finally:
            self._sizes = []
            self._loader.free()

    def gathered(self, value: Any) -> list[tuple[Any, int]]:
        """Return a value of each rank that has a batch in this round, in the order of the dataset, with the size of the batch.

        All ranks call this. Tensors are in host memory.
        """
        found = self._run.gather(value)
        return [(each, size) for each, size in zip(found, self._sizes, strict=True) if size]

    def _number(self, round_number: int, rank: int) -> int:
        return round_number * self._run.world_size + rank

    def _batch_of(self, number: int) -> int:
        """Return the number of the batch that a rank evaluates, which is another one's in a round without a batch for it."""
        return min(number, self._num_batches - 1)

    def _size(self, number: int) -> int:
        return max(min(self.batch_size, len(self.dataset) - number * self.batch_size), 0)

    def _request(self, number: int) -> Request:
        batch, seed = self._batch_of(number), self._run.plan.spec.seed
        start = batch * self.batch_size
        ids = np.arange(start, start + self._size(batch), dtype=np.int64)
        keys = subkeys(key64("evaluation sample", seed), ids)
        return Request(ids, keys, int(subkeys(key64("evaluation collate", seed), batch)))
