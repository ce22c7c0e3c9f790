"""Checks of the DataLoaders of a script, and the settings of the plan that follow from the one with the training data."""

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from undula.config.yaml_file import Setting
from undula.data.script.dataset import REPLACEMENTS, check_indexed
from undula.errors import UsageError


def check_loader(loader: "DataLoader[Any]", got: str, storing: str) -> None:
    """Refuse a DataLoader whose batches have no position.

    Args:
        loader: DataLoader of the script.
        got: Beginning of the message, which names the place where the script gives it.
        storing: What the script does with samples that are stored as Parquet.

    Raises:
        UsageError: It has an iterable dataset, a batch sampler of its own, or arguments that a run does not take.
    """
    check_indexed(loader.dataset, f"{got} of", storing=storing)
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        instead = f"pass batch_size= instead, because {REPLACEMENTS['batch_sampler']}"
        raise UsageError(f"{got} with a batch sampler of its own; {instead}")
    for argument in ("generator", "worker_init_fn"):
        if getattr(loader, argument) is not None:
            raise UsageError(f"{got} with {argument}=; {REPLACEMENTS[argument]}")


def is_shuffled(loader: "DataLoader[Any]", got: str) -> bool:
    """Return whether a DataLoader draws each sample of its dataset once, or takes them in their order.

    Raises:
        UsageError: It does neither.
    """
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        return True
    if not isinstance(sampler, SequentialSampler):
        instead = f"set shuffle= instead, because {REPLACEMENTS['sampler']}"
        raise UsageError(f"{got} with a {type(sampler).__name__}; {instead}")
    return False


def drops_last(loader: "DataLoader[Any]", batch_of_all: int, global_batch: int) -> bool:
    """Return whether an incomplete step is left out. If batches divide the dataset, drop_last leaves out no sample.

    Args:
        loader: DataLoader of the script.
        batch_of_all: Number of samples that all virtual workers take at once, in a micro-batch each.
        global_batch: Number of samples of a step.
    """
    rows = len(loader.dataset)  # type: ignore[arg-type]
    return loader.drop_last and (rows % batch_of_all > 0 or rows % global_batch == 0)


def plan_settings(
    loader: "DataLoader[Any]", got: str, origin: str, virtual_workers: int, batch_of_all: int, accumulation: int
) -> dict[str, Setting]:
    """Return the settings of the plan that follow from the DataLoader that trains, by dotted key.

    Args:
        loader: DataLoader of the script.
        got: Beginning of the message of an error.
        origin: Name of the DataLoader, for messages.
        virtual_workers: Number of virtual workers.
        batch_of_all: Number of samples that all virtual workers take at once.
        accumulation: Number of batches of each virtual worker in a step.

    Raises:
        UsageError: A plan cannot have its order.
    """
    batch = batch_of_all * accumulation
    values = {
        "plan.global_batch": batch,
        "plan.micro_batch": batch_of_all // virtual_workers,
        "plan.shuffle": "window" if is_shuffled(loader, got) else "none",
        "plan.last_step": "drop" if drops_last(loader, batch_of_all, batch) else "short",
    }
    return {key: Setting(value, origin) for key, value in values.items()}
