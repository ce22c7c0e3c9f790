"""Parts of Hugging Face's libraries as the Trainer uses them: the state of the process, datasets, callbacks and results of batches."""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import reduce
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import nested_concat
from transformers.trainer_utils import get_last_checkpoint

from undula.adapters.evaluation import RankBatches
from undula.adapters.process_state import shared_state
from undula.adapters.refusals import TRAINER_METHODS, refused_override
from undula.adapters.script import Place
from undula.data.script.dataset import check_indexed
from undula.errors import SpecError, UsageError
from undula.train.measurement import recorded
from undula.train.run import Run
from undula.train.script_source import refuse_number_of_workers

LOGGED = ("loss", "train_loss", "grad_norm", "learning_rate", "epoch", "step", "num_input_tokens_seen", "total_flos")
"""Numbers that Hugging Face's Trainer logs itself."""
# The process group is the run's, so that the advice to start the script with torch's launcher would mislead.
logging.getLogger("transformers.training_args").addFilter(lambda record: "ParallelMode" not in record.getMessage())
IN_EVALUATION = "compute what you need in compute_metrics, and leave get_eval_dataloader() as it is"
"""What to do instead of collectives of a script in an evaluation."""
MEASURED = ("_runtime", "_per_second", "_model_preparation_time")
"""Ends of the names of metrics that are durations, which differ from rank to rank."""


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


def gathered_in_evaluation(batches: RankBatches | None, value: Any) -> Any:
    """Return the tensors of a batch of each rank, joined in the order of the dataset.

    Raises:
        UsageError: There is no batch of an evaluation.
    """
    if batches is None:
        raise UsageError(
            f"accelerator.gather() was called outside of a step and of an evaluation of the trainer's own batches; {IN_EVALUATION}"
        )
    host = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)
    return joined(batches.gathered(host), batches.batch_size)


def _of_samples(value: Any, size: int, batch_size: int) -> Any:
    # Hugging Face's loop repeats the loss of each batch for a full batch. Nothing else of a smaller batch has rows in excess.
    is_repeated = isinstance(value, Tensor) and value.dim() == 1 and len(value) == batch_size
    return value[:size] if is_repeated else value


def _two_joined(one: Any, other: Any) -> Any:
    if isinstance(one, list) and all(isinstance(item, Mapping) for item in one):
        return [*one, *other]
    return nested_concat(one, other, padding_index=-100)


def require_on_all_ranks(folder: str, run: Run | None) -> None:
    """Check that all ranks see a folder, because they would go on with different weights otherwise.

    Raises:
        UsageError: One does not.
    """
    assert run is not None
    missing = [rank for rank, is_there in enumerate(run.gather(Path(folder).is_dir())) if not is_there]
    if missing:
        raise UsageError(
            f"TrainingArguments.load_best_model_at_end: rank {missing[0]} does not see the best model {folder}; set output_dir to a folder "
            "that all nodes share"
        )


def refuse_overrides(kind: type, mixin: type) -> None:
    """Refuse a trainer with methods of its own in place of those of Hugging Face's loop that a run does not call, or whose loss depends on
    the number of workers.

    Args:
        kind: Class of the trainer.
        mixin: Class that makes it elastic.

    Raises:
        UsageError: It has one.
    """
    for method in [method for method in TRAINER_METHODS if hasattr(transformers.Trainer, method)]:
        owner = next(base for base in kind.__mro__ if base is not mixin and method in vars(base))
        if owner is not transformers.Trainer:
            raise refused_override(owner, method, TRAINER_METHODS)
    for method in ("training_step", "compute_loss"):
        refuse_number_of_workers(getattr(kind, method), "self.accelerator.num_processes")


def check_data(training: Any, evaluation: Any, collator: Any) -> None:
    """Check that a run can use the datasets of a Trainer and its data collator.

    Raises:
        UndulaError: It cannot use one of them.
    """
    if type(collator).__module__.startswith("transformers.") and getattr(collator, "seed", None) is not None:
        raise SpecError(
            f"the {type(collator).__name__} has seed={collator.seed}, with which each worker draws numbers of its own; remove seed, since "
            "the run seeds what a collator draws by the step and the sample"
        )
    loading = "data_collator= and dataloader_num_workers"
    check_indexed(training, "train_dataset= of the Trainer is", loading, "use undula.main")
    several = evaluation if isinstance(evaluation, dict) else {None: evaluation}
    for name, dataset in several.items():
        if dataset is not None and not hasattr(dataset, "__len__"):
            raise SpecError(
                f"eval_dataset{'=' if name is None else f'[{name!r}]'} of the Trainer has no length, so that workers cannot share it; pass "
                "a view of it with __len__ and __getitem__"
            )


def evaluated(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the means of an evaluation by name, without durations."""
    return {name.removeprefix("eval_"): value for name, value in _numbers(metrics).items() if name.startswith("eval_")}


def logged_by_script(logged: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an entry of the log history that the script or another library has added."""
    # The numbers of an evaluation are recorded with its result.
    is_evaluation = any(name.startswith("eval_") and name.endswith("_runtime") for name in logged)
    return {
        name: value
        for name, value in _numbers(logged).items()
        if name not in LOGGED and not (is_evaluation and name.startswith("eval_"))
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, of Python, NumPy or torch, without durations."""
    return {
        name: recorded(value)
        for name, value in values.items()
        if not name.endswith(MEASURED)
        and (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1))
    }


class LogHistory:
    """The log history of a Trainer as JSON. Only new entries are written, because all of it takes longer the longer it is."""

    def __init__(self) -> None:
        self._entries, self._text = 0, "[]"

    def of(self, history: Sequence[Mapping[str, Any]]) -> str:
        if len(history) > self._entries:
            new = json.dumps(history[self._entries :], default=float)
            self._text = f"{self._text[:-1]}, {new[1:]}" if self._entries else new
            self._entries = len(history)
        return self._text

    def restore(self, text: str) -> list[dict[str, Any]]:
        history: list[dict[str, Any]] = json.loads(text)
        self._entries, self._text = len(history), text
        return history


def gather_root(model: Any) -> None:
    """Gather the weights of a sharded model outside of units, by a forward pass that does nothing. All ranks call this together.

    Torch needs such a pass before units are called alone, and its `unshard()` is none.
    """
    replaced = model.__dict__.get("forward")
    model.forward = lambda: None
    try:
        with torch.enable_grad():  # otherwise, the run frees them after the pass
            model()
    finally:
        del model.forward
        if replaced is not None:
            model.forward = replaced


def exported_state(callback: Any) -> dict[str, Any]:
    """Return the attributes of a callback that it exports as its state."""
    return dict(callback.state()["attributes"]) if isinstance(callback, ExportableState) else {}


def is_of_datasets(dataset: Any) -> bool:
    """Return whether a dataset is one of the library `datasets`."""
    return type(dataset).__module__.split(".")[0] == "datasets"


def place_process(args: Any, here: Place) -> None:
    """Make Hugging Face's libraries see a process with a rank, on a device, without collectives of their own."""
    assert args.device is not None  # makes the shared state, if nothing has done so yet
    args.__dict__["_setup_devices"] = here.device  # a cached property
    args._n_gpu = min(args._n_gpu, 1)
    # Arguments that are a global of the script come to a worker pickled, with a copy of the state that nothing else shares.
    args.distributed_state = shared_state(here, args.use_cpu)


def found_checkpoint(given: Any, output_dir: str) -> str | None:
    """Return the checkpoint in the folder of a Trainer that a script gives to `train`; None for none.

    Raises:
        SpecError: It is in another folder.
    """
    found = get_last_checkpoint(output_dir) if given is True and Path(output_dir).is_dir() else given
    if found in (None, False, True):
        return None
    if Path(output_dir).absolute() not in Path(found).absolute().parents:
        raise SpecError(
            f"Trainer.train() got resume_from_checkpoint={found}, which is not in output_dir; a run continues by itself, and for weights "
            "of another training, load them with from_pretrained()"
        )
    return str(found)


def require_begun(found: str | None, is_restored: bool) -> None:
    """Check that a checkpoint that a script gives to `train` can be one of its own run.

    Raises:
        UsageError: The run has not begun.
    """
    if found is not None and not is_restored:
        raise UsageError(
            f"Trainer.train() got resume_from_checkpoint={found}, which is of another training, because this run has not begun; give it "
            "an output_dir without checkpoints"
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
