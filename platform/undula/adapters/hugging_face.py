"""Parts of Hugging Face's libraries as the adapters use them: the state of the process, datasets, callbacks and results of batches."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import nested_concat

from undula.errors import SpecError, UsageError
from undula.train.run import Run

_ORDER = "a run decides the samples of a batch; set train_sampling_strategy and pass train_dataset and data_collator"
_LOOP = "a run has a loop of its own; use a TrainerCallback"
_NORM = "set max_grad_norm"
NOT_CALLED: Mapping[str, str] = {
    "get_train_dataloader": _ORDER,
    "_get_train_sampler": _ORDER,
    "_get_eval_sampler": "evaluations go through a dataset in its order; pass it as you want it",
    "_get_dataloader": "pass the datasets and data_collator",
    "get_batch_samples": "override compute_loss()",
    "_clip_grad_norm": _NORM,
    "_get_grad_norm": _NORM,
    "_inner_training_loop": _LOOP,
    "_prepare_for_training": _LOOP,
    "_run_epoch": _LOOP,
}
"""Methods of Hugging Face's Trainer that a run does not call, and what to do instead of overriding them."""

_REFUSED_DEVICE = {"bf16": "support bf16", "tf32": "--tf32 requires"}
"""Parts of the errors with which TrainingArguments refuse a device, by argument."""
_ON_WORKERS = {
    "bf16": "leave it out, and set precision.compute: bf16 in the job's YAML, which the driver does not need a GPU for",
    "tf32": "leave it out, and call torch.set_float32_matmul_precision('high') in the main function",
}


class PlannedBatches:
    """Stand-in for the training DataLoader, whose length Hugging Face's code needs."""

    def __init__(self, dataset: Any, length: int):
        self.dataset = dataset
        self._length = length

    def __len__(self) -> int:
        return self._length


def joined(parts: Sequence[tuple[Any, int]], batch_size: int) -> Any:
    """Return the results for batches, given with their sizes, as one. Lists with a mapping for each sample are put one after another."""
    return reduce(_two_joined, (_of_samples(part, size, batch_size) for part, size in parts))


def _of_samples(value: Any, size: int, batch_size: int) -> Any:
    # Hugging Face's loop repeats the loss of each batch for a full batch. Nothing else of a smaller batch has rows in excess.
    is_repeated = isinstance(value, Tensor) and value.dim() == 1 and len(value) == batch_size
    return value[:size] if is_repeated else value


def _two_joined(one: Any, other: Any) -> Any:
    if isinstance(one, list) and all(isinstance(each, Mapping) for each in one):
        return [*one, *other]
    return nested_concat(one, other, padding_index=-100)


def refuse_overrides(kind: type, mixin: type) -> None:
    """Refuse a trainer with methods of its own in place of those of Hugging Face's loop that a run does not call.

    Args:
        kind: Class of the trainer.
        mixin: Class that makes it elastic.

    Raises:
        UsageError: It has one.
    """
    for name, instead in NOT_CALLED.items():
        owner = next((each for each in kind.__mro__ if each is not mixin and name in vars(each)), transformers.Trainer)
        if owner is not transformers.Trainer:
            raise UsageError(f"{owner.__name__} overrides {name}(), which a run does not call; {instead}")


@contextmanager
def explained_devices() -> Iterator[None]:
    """Say what to do if Hugging Face's code refuses arguments because this process, the driver, lacks the GPU of the workers.

    Raises:
        SpecError: It does.
    """
    try:
        yield
    except ValueError as error:
        found = next((name for name, text in _REFUSED_DEVICE.items() if text in str(error)), None)
        if found is None:
            raise
        raise SpecError(
            f"TrainingArguments.{found} is refused on this machine, whose GPU cannot do it; {_ON_WORKERS[found]}"
        ) from error


def exported_state(callback: Any) -> dict[str, Any]:
    """Return the attributes of a callback that it exports as its state."""
    return dict(callback.state()["attributes"]) if isinstance(callback, ExportableState) else {}


def is_of_datasets(dataset: Any) -> bool:
    """Return whether a dataset is one of the library `datasets`."""
    return type(dataset).__module__.split(".")[0] == "datasets"


def place_process(args: Any, rank: int, virtual_workers: int, device: torch.device) -> None:
    """Make Hugging Face's libraries see a process with a rank, on a device, without collectives of their own."""
    assert args.device is not None  # makes the shared state, if nothing has done so yet
    args.__dict__["_setup_devices"] = device  # a cached property
    args._n_gpu = min(args._n_gpu, 1)
    # Arguments that are a global of the script come to a worker pickled, with a copy of the state that nothing else shares.
    args.distributed_state = PartialState(cpu=args.use_cpu)
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        if shared:
            shared.update(
                num_processes=virtual_workers,
                process_index=rank,
                local_process_index=rank,
                distributed_type=DistributedType.NO,
                device=device,
            )


def shared_folder(output_dir: str, run: Run) -> str:
    """Return an absolute path for the saved models: a relative one is below the run directory.

    Raises:
        UsageError: The run directory is no folder.
    """
    if Path(output_dir).expanduser().is_absolute():
        return str(Path(output_dir).expanduser())
    if "://" in run.url:
        raise UsageError(
            f"TrainingArguments.output_dir is {output_dir!r}, but the run directory {run.url} is no folder that it could be in; give the "
            "absolute path of a folder that all nodes share"
        )
    return str(Path(run.url).expanduser().absolute() / output_dir)
