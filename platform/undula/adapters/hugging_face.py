"""Parts of Hugging Face's libraries as the adapters use them: the state of the process, datasets, callbacks and nested tensors."""

from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.trainer_callback import ExportableState

from undula.errors import UsageError
from undula.train.run import Run


class PlannedBatches:
    """Stand-in for the training DataLoader, whose length Hugging Face's code needs."""

    def __init__(self, dataset: Any, length: int):
        self.dataset = dataset
        self._length = length

    def __len__(self) -> int:
        return self._length


def trimmed(value: Any, size: int) -> Any:
    """Return the first `size` rows of all tensors."""
    return tree_map_only(Tensor, lambda tensor: tensor[:size] if tensor.dim() else tensor, value)


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
