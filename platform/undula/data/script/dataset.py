"""Datasets that a script passes to `run.dataset`: which objects are accepted, and what refused ones are told."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset, Subset

from undula.data.script.indexed import IndexedData, ScriptData
from undula.errors import UsageError

REPLACEMENTS: Mapping[str, str] = {
    "batch_size": "set plan.global_batch and plan.micro_batch in the job's YAML",
    "shuffle": "set plan.shuffle in the job's YAML",
    "drop_last": "set plan.last_step in the job's YAML",
    "sampler": "the plan decides the order; to weight samples, repeat their indices in the dataset",
    "batch_sampler": "the plan decides the order and the sizes of batches",
    "generator": "set plan.seed in the job's YAML",
    "worker_init_fn": "prepare what a loader process needs in the dataset, on its first sample",
    "persistent_workers": "loader processes always persist",
    "pin_memory": "batches are always pinned if the device is a GPU",
}
"""Arguments of torch's DataLoader that a run does not take, and what to do instead."""
NO_MAP = "run.map() transforms rows of Parquet files, but this run reads the dataset of run.dataset(); transform samples in its __getitem__"
"""Message for a script that calls `run.map` although it gives its own dataset."""


class IndexedDataset(Protocol):
    """Dataset in the style of torch's map-style datasets: a length, and a sample for each index from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def reads_several(dataset: object) -> bool:
    """Return whether a dataset reads several samples at once by `__getitems__`, as those of Hugging Face do.

    A Subset of torch has that method too, but calls the same method of the dataset below only if there is one.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def script_data(
    dataset: object,
    validation: object | None,
    name: str | None,
    num_workers: int,
    loader_arguments: Mapping[str, object],
) -> ScriptData:
    """Return the length and the identity of the data that a script has passed to `run.dataset`, which takes these arguments.

    Raises:
        UsageError: The run cannot use them.
    """
    for argument in loader_arguments:
        raise UsageError(f"run.dataset() does not take {argument}=; {REPLACEMENTS.get(argument, 'remove it')}")
    if num_workers < 0:
        raise UsageError(f"run.dataset() got num_workers={num_workers}; set it to 0 or more")
    if name == "":
        raise UsageError('run.dataset() got name=""; give a name that changes when the content does, or leave it out')
    return ScriptData(
        _identified(dataset, name), None if validation is None else _identified(validation, name), num_workers
    )


def _identified(dataset: object, name: str | None = None) -> IndexedData:
    """Return the length and the identity of a dataset: the given name, or else its fingerprint.

    Raises:
        UsageError: The object is not a dataset that can be read by index.
    """
    check_indexed(dataset)
    return IndexedData(len(dataset), name or fingerprint_of(dataset) or "")  # type: ignore[arg-type]


def fingerprint_of(dataset: object) -> str | None:
    """Return the text by which Hugging Face's `datasets` identify the content of a dataset; None if it has none."""
    fingerprint = getattr(dataset, "_fingerprint", None)
    return str(fingerprint) if fingerprint else None


def check_indexed(
    dataset: object,
    got: str = "run.dataset() got",
    loading: str = "collate_fn= and num_workers=",
    storing: str = "set data.train",
) -> None:
    """Check that a dataset can be read by index.

    Args:
        dataset: Dataset of the script.
        got: Beginning of the message about another object, which names the place where the script gives it.
        loading: Arguments with which the script gives the rest of a DataLoader.
        storing: What the script does with samples that are stored as Parquet.

    Raises:
        UsageError: It cannot.
    """
    if isinstance(dataset, DataLoader):
        raise UsageError(
            f"{got} a DataLoader, whose sampler or batch sampler would decide the order in place of the plan; pass the dataset itself, "
            f"with {loading}"
        )
    if isinstance(dataset, Mapping):
        raise UsageError(f"{got} a mapping with the keys {', '.join(map(repr, dataset))}; pass one of its datasets")
    # Iterable datasets of other libraries do not derive from torch's, and torch's inherits a __getitem__ that only raises.
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        kind = "an IterableDataset" if hasattr(dataset, "__iter__") else f"an object of type {type(dataset).__name__}"
        raise UsageError(
            f"{got} {kind}, whose samples have no index, so that a run could not continue at its position; write the samples as Parquet "
            f"with `undula data convert` and {storing}, or pass a view of them with __len__ and __getitem__"
        )
