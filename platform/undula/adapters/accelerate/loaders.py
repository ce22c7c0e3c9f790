"""DataLoaders that a script gives to an Accelerator: the one that trains, and how ranks share the others."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from undula.adapters.evaluation import RankBatches, kept_loader
from undula.adapters.loaders import check_loader, drops_last, plan_settings
from undula.config.yaml_file import Setting
from undula.data.nested import moved, tensors_of, with_tensors
from undula.data.script.loader_processes import Loader
from undula.errors import UsageError
from undula.train.run import Run

GOT = "accelerator.prepare() got a DataLoader"


class PreparedLoader:
    """DataLoader that `prepare` returns. Scripts read its length, its dataset and its batch size.

    Args:
        loader: DataLoader of the script.
        virtual_workers: Number of virtual workers of the plan.
        is_split: Whether the virtual workers share a batch of the DataLoader, instead of taking one each.
    """

    def __init__(self, loader: "DataLoader[Any]", virtual_workers: int, is_split: bool):
        check_loader(loader, GOT, storing="use undula.main")
        self.dataset: Any = loader.dataset
        self.batch_size: int = loader.batch_size or 1
        self.loader = loader
        self._virtual_workers = virtual_workers
        if is_split and self.batch_size % virtual_workers:
            raise UsageError(
                f"split_batches=True shares a batch among plan.virtual_workers={virtual_workers}, which does not divide "
                f"batch_size={self.batch_size}; change one of them"
            )
        self.batch_of_all = self.batch_size if is_split else self.batch_size * virtual_workers
        """Number of samples that all virtual workers take at once, in a micro-batch each."""


class TrainingLoader(PreparedLoader):
    """DataLoader that trains: an iteration yields the micro-batches of this rank in the steps of an epoch.

    Args:
        loader: DataLoader of the script.
        virtual_workers: Number of virtual workers of the plan.
        is_split: Whether the virtual workers share a batch of the DataLoader.
        accumulation: Number of batches of each virtual worker in a step.
    """

    batches: Callable[[], Iterator[Any]] | None = None
    """Function that yields the micro-batches of the epoch; None outside of the loop over `epochs`."""

    def __init__(self, loader: "DataLoader[Any]", virtual_workers: int, is_split: bool, accumulation: int):
        super().__init__(loader, virtual_workers, is_split)
        self._accumulation = accumulation

    def __len__(self) -> int:
        """Return the number of batches of each virtual worker in an epoch, as of each process of Accelerate."""
        batch = self.batch_of_all * self._accumulation
        if drops_last(self.loader, self.batch_of_all, batch):
            return len(self.dataset) // batch * self._accumulation
        return math.ceil(len(self.dataset) / self.batch_of_all)

    def __iter__(self) -> Iterator[Any]:
        if self.batches is None:
            raise UsageError(
                "the training DataLoader was iterated over outside of `for epoch in accelerator.epochs(n)`; write the loop over epochs so"
            )
        return self.batches()

    def settings(self) -> dict[str, Setting]:
        """Return the plan's settings that follow from the DataLoader, by dotted key.

        Raises:
            UsageError: A plan cannot have its order.
        """
        got, origin = "accelerator.prepare() got a training DataLoader", "the training DataLoader of the script"
        return plan_settings(self.loader, got, origin, self._virtual_workers, self.batch_of_all, self._accumulation)


class EvaluationLoader(PreparedLoader):
    """DataLoader that evaluates: its batches are dealt out to the ranks in turn, so that what they gather is in the dataset's order.

    Args:
        loader: DataLoader of the script.
        virtual_workers: Number of virtual workers of the plan.
        is_split: Whether the virtual workers share a batch of the DataLoader.
        number: Number of the DataLoader among those for evaluation that the script prepares before it trains, whose processes are kept;
            None for one that it prepares later, whose processes end with each iteration.
        world_size: Number of ranks.
        current: DataLoaders that are being iterated over, to which this one adds itself.
        run_of: Function that returns the run, or raises an error if no evaluation can begin.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        virtual_workers: int,
        is_split: bool,
        number: int | None,
        world_size: int,
        current: "list[EvaluationLoader]",
        run_of: Callable[[], Run],
    ):
        super().__init__(loader, virtual_workers, is_split)
        if not isinstance(loader.sampler, SequentialSampler):
            raise UsageError(
                f"{GOT} for evaluation with a {type(loader.sampler).__name__}; evaluate in the dataset's order, with shuffle=False (the "
                "first DataLoader that prepare() gets is the one that trains)"
            )
        if loader.drop_last:
            raise UsageError(f"{GOT} for evaluation with drop_last=True; evaluate all samples")
        self._number = number
        self._world_size = world_size
        self._current = current
        self._run_of = run_of
        self.batches: RankBatches | None = None
        """Batches of the current iteration; None outside of one."""

    def __len__(self) -> int:
        return math.ceil(math.ceil(len(self.dataset) / self.batch_size) / self._world_size)

    def __iter__(self) -> Iterator[Any]:
        run = self._run_of()
        workers = self.loader.num_workers
        loader = Loader(workers) if self._number is None else kept_loader(run, str(self._number), workers)
        self.batches = RankBatches(run, self.dataset, self.loader.collate_fn, self.batch_size, loader)
        self._current.append(self)
        try:
            for batch in self.batches:
                yield moved(batch, run.device)
        finally:
            self._current.remove(self)
            self.batches = None
            if self._number is None:
                loader.close()

    def gathered(self, value: Any) -> Any:
        """Return the results of all ranks for their current batches as one, without those of repeated batches and samples."""
        assert self.batches is not None

        def counted(part: Any, count: int) -> Any:
            if isinstance(part, list) and next(tensors_of(part), None) is None:
                return part[:count]
            # A script may repeat the loss of a batch for each of its samples, and does not know that the last batch has fewer.
            return with_tensors(part, lambda it: it[:count] if it.ndim and len(it) == self.batch_size else it)

        return merged([counted(part, size) for part, size in self.batches.gathered(value)])


def merged(parts: list[Any]) -> Any:
    """Return the results of ranks as one: tensors along their first dimension, lists of other objects one after another.

    Raises:
        UsageError: They are neither, nor a tuple, a list or a mapping of these.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([part if part.ndim else part[None] for part in parts])
    if isinstance(first, dict):
        return {key: merged([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple) or (isinstance(first, list) and next(tensors_of(first), None) is not None):
        return type(first)(merged(list(places)) for places in zip(*parts, strict=True))
    if isinstance(first, list):
        return [item for part in parts for item in part]
    raise UsageError(f"an object of type {type(first).__name__} cannot be gathered; pass tensors, or a list of objects")
