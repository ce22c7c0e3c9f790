"""What a run does not take of a Lightning script, and what replaces it: hooks, callbacks, loaders and schedulers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, default_collate
from torch.utils.data.sampler import BatchSampler

from undula.adapters.lightning_library import Library, name_of
from undula.data.script.dataset import check_indexed
from undula.errors import UsageError
from undula.plan.plan import Plan

HOOKS: Mapping[str, str] = {
    "optimizer_step": "a run steps the optimizer itself; return a scheduler from configure_optimizers to change the learning rate",
    "optimizer_zero_grad": "a run frees gradients itself",
    "backward": "a run calls backward itself; return the loss from training_step",
    "configure_gradient_clipping": "set gradient.max_norm in the job's YAML",
    "configure_sharded_model": "use configure_model",
    "on_validation_model_eval": "a run sets the eval mode itself, and restores the mode of each layer",
    "on_validation_model_train": "a run sets the eval mode itself, and restores the mode of each layer",
    "on_validation_model_zero_grad": "a run has freed the gradients when it validates",
}
"""Hooks of a LightningModule that a run does not call, and what to do instead."""
CALLBACKS: Mapping[str, str] = {
    "Checkpoint": "set checkpoint.every_steps in the job's YAML, and checkpoint.keep_best for the best one",
    "EarlyStopping": "set stop in the job's YAML: {metric: val_loss, mode: min, patience: 3}",
    "LearningRateMonitor": "remove it; the learning rate of each step is in the report and in TensorBoard",
    "DeviceStatsMonitor": "remove it; TensorBoard and Prometheus show where the time of each step goes",
    "ProgressBar": "remove it; the driver shows the progress of the run",
    "ModelSummary": "remove it; print the module in the script",
    "Timer": "set workers.fleet, or plan.max_steps, in the job's YAML",
    "StochasticWeightAveraging": "average the checkpoints that checkpoint.keep keeps, with undula.load_weights",
    "WeightAveraging": "average the checkpoints that checkpoint.keep keeps, with undula.load_weights",
    "GradientAccumulationScheduler": "set plan.global_batch and plan.micro_batch in the job's YAML; the batch of a run is fixed",
    "BaseFinetuning": "freeze layers in configure_model, because its parameter groups would not be restored",
    "ModelPruning": "prune the exported weights, because masks would not be restored",
    "BatchSizeFinder": "choose plan.micro_batch in the job's YAML",
    "LearningRateFinder": "compare learning rates with `undula study`",
}
"""Callbacks of Lightning, by the name of their class or of a base class of it, and what to do instead."""


@dataclass(frozen=True)
class Loaded:
    """Arguments of `run.dataset` that a DataLoader of a Lightning script has."""

    dataset: Dataset[Any]
    collate_fn: Any
    num_workers: int
    batch_size: int
    shuffles: bool
    drops_last: bool


def check_run(run: object) -> None:
    """Refuse a module or a data module in the place of the run.

    Raises:
        UsageError: There is one.
    """
    if hasattr(run, "prepare_data"):  # both have this hook
        raise UsageError(
            f"fit() got {name_of(run)} in place of the run; call fit(run, module, datamodule) in the train function, which gets the run"
        )


def check_module(module: Any, library: Library) -> None:
    """Refuse a module that trains in a way that a run does not support.

    Raises:
        UsageError: It does.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UsageError(
            f"{name} sets automatic_optimization=False, but a run calls backward and steps the one optimizer itself; return the loss from "
            "training_step, or write the loop with run.steps()"
        )
    for hook, instead in HOOKS.items():
        if library.is_overridden(hook, module):
            raise UsageError(f"{name} overrides {hook}(), which a run does not call; {instead}")
    for step in ("training_step", "validation_step"):
        if library.takes(getattr(module, step), "dataloader_iter"):
            raise UsageError(
                f"{name}.{step}() takes dataloader_iter, but a run reads the batches by the plan; take batch and batch_idx"
            )


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse callbacks whose work a run does itself or cannot resume.

    Raises:
        UsageError: There is one.
    """
    for callback in callbacks:
        for base in type(callback).__mro__:
            if base.__name__ in CALLBACKS and "lightning" in base.__module__:
                raise UsageError(
                    f"fit() got the callback {type(callback).__name__}, which a run does not take; {CALLBACKS[base.__name__]}"
                )


def loaded(found: object, hook: str) -> Loaded:
    """Return what a run takes of the result of a dataloader hook.

    Raises:
        UsageError: It is not one DataLoader over a dataset whose order the plan can decide.
    """
    if not isinstance(found, DataLoader):
        raise UsageError(
            f"{hook}() returned {name_of(found)}, but a run reads one map-style dataset; return one DataLoader of torch"
        )
    sampler, dataset = found.sampler, found.dataset
    check_indexed(dataset, f"the DataLoader of {hook}() has", storing="write the loop with run.steps()")
    if type(found.batch_sampler) is not BatchSampler or type(sampler) not in (RandomSampler, SequentialSampler):
        own = found.batch_sampler if type(sampler) in (RandomSampler, SequentialSampler) else sampler
        raise UsageError(
            f"the DataLoader of {hook}() has {name_of(own)}, but the plan decides the order and the sizes of batches; remove it, and set "
            "shuffle="
        )
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(dataset)):  # type: ignore[arg-type]
        raise UsageError(
            f"the DataLoader of {hook}() draws samples with replacement or a part of them, but a run uses each sample of an epoch once; "
            "set shuffle=True in its place"
        )
    for argument, instead in (
        ("worker_init_fn", "prepare what a loader process needs in the dataset, on its first sample"),
        ("generator", "set plan.seed in the job's YAML"),
    ):
        if getattr(found, argument) is not None:
            raise UsageError(f"the DataLoader of {hook}() has {argument}=, which a run does not take; {instead}")
    collate = None if found.collate_fn is default_collate else found.collate_fn
    assert found.batch_size is not None  # it belongs to the batch sampler of torch
    return Loaded(
        dataset,
        collate,
        found.num_workers,
        found.batch_size,
        isinstance(sampler, RandomSampler),
        found.drop_last,
    )


def check_collate(training: Loaded, validation: Loaded | None) -> None:
    """Refuse a validation loader that makes batches in another way than the training loader.

    Raises:
        UsageError: It does.
    """
    if validation and validation.collate_fn is not training.collate_fn and validation.collate_fn != training.collate_fn:
        raise UsageError(
            "the DataLoaders of train_dataloader() and val_dataloader() have different collate_fn=, but a run collates both in one "
            "way; use one function"
        )


def check_plan(training: Loaded, plan: Plan) -> None:
    """Refuse a training loader that says something else about the order and the batches than the plan.

    Raises:
        UsageError: It does.
    """
    spec = plan.spec
    size = min(spec.micro_batch or plan.virtual_worker_batch, plan.virtual_worker_batch)
    if training.batch_size != size:
        raise UsageError(
            f"the DataLoader of train_dataloader() has batch_size={training.batch_size}, but the plan has micro-batches of {size} samples; "
            f"set plan.micro_batch={training.batch_size} in the job's YAML, with a plan.global_batch of batch_size x "
            f"accumulate_grad_batches x plan.virtual_workers, or batch_size={size}"
        )
    if training.shuffles != (spec.shuffle != "none"):
        yours, value = ("shuffle=True", "window") if training.shuffles else ("shuffle=False", "none")
        raise UsageError(
            f"the DataLoader of train_dataloader() has {yours}, but plan.shuffle is {spec.shuffle}; set plan.shuffle={value} in the job's "
            "YAML, or change the DataLoader"
        )
    if training.drops_last and spec.last_step != "drop":
        raise UsageError(
            f"the DataLoader of train_dataloader() has drop_last=True, but plan.last_step is {spec.last_step}; set plan.last_step=drop in "
            "the job's YAML, or drop_last=False"
        )


def one_optimizer(optimizers: list[Any], configs: list[Any]) -> Any:
    """Return the optimizer of `configure_optimizers`.

    Raises:
        UsageError: There is not exactly one, or a run cannot step one of its schedulers.
    """
    if len(optimizers) != 1:
        raise UsageError(
            f"configure_optimizers() returned {len(optimizers)} optimizers, but a run has one; use one optimizer with several parameter "
            "groups"
        )
    for config in configs:
        if config.reduce_on_plateau:
            raise UsageError(
                "configure_optimizers() returned a ReduceLROnPlateau, which needs a metric at each of its steps; use a scheduler that "
                "depends on the number of steps or epochs only"
            )
        if config.frequency != 1:
            raise UsageError(
                f"configure_optimizers() returned a scheduler with frequency={config.frequency}, but a run steps it every time; divide the "
                "number of steps in the scheduler itself"
            )
    return optimizers[0]


def check_rate(optimizer: torch.optim.Optimizer, base_lr: float) -> None:
    """Refuse an optimizer without a scheduler whose learning rate is not that of the job.

    Raises:
        UsageError: It is not.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if base_lr not in rates:
        raise UsageError(
            f"the optimizer of configure_optimizers() has the learning rate {rates[0]:g}, but schedule.base_lr is {base_lr:g}; set "
            f"schedule.base_lr={rates[0]:g} in the job's YAML, with schedule.decay=constant for a rate that stays, or return a scheduler "
            "with the optimizer"
        )


def check_schedule(gives_decay: bool) -> None:
    """Refuse a module without a scheduler if the job would let its learning rate decay by default.

    Args:
        gives_decay: Whether the job's YAML sets schedule.decay.

    Raises:
        UsageError: It does not.
    """
    if not gives_decay:
        raise UsageError(
            "configure_optimizers() returned no scheduler, with which Lightning keeps the learning rate constant, but a job decays it "
            "along a cosine by default; set schedule.decay=constant in the job's YAML, or another decay that the run shall have"
        )
