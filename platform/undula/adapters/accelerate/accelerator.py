"""The stand-in for Accelerate's Accelerator: what a script gives to `prepare`, and what its loop calls for each batch."""

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from undula.adapters.accelerate.loaders import EvaluationLoader, PreparedLoader, TrainingLoader
from undula.adapters.accelerate.prepared import PreparedOptimizer, PreparedScheduler
from undula.adapters.accelerate.processes import Processes
from undula.adapters.accelerate.repeated import last_batch, undone
from undula.adapters.accelerate.steps import Steps
from undula.adapters.refusals import (
    ACCELERATOR,
    ACCELERATOR_ARGUMENTS,
    refuse_arguments,
    refuse_backward,
    refuse_launched,
)
from undula.adapters.script import Offer, place
from undula.adapters.source import refuse_break, refuse_counted_steps
from undula.config.yaml_file import Setting
from undula.data.script.dataset import check_indexed
from undula.errors import UsageError
from undula.parallel.precision import dtype_of
from undula.plan.precision import Compute
from undula.train.run import Run
from undula.train.script_source import refuse_number_of_workers_in_loops
from undula.train.whole_weights import placed

PRECISIONS: Mapping[str, Compute] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
"""Values of `precision.compute` by those of `mixed_precision`."""
DEFAULTS: Mapping[str, object] = dict.fromkeys((*ACCELERATOR_ARGUMENTS, "project_dir", "project_config")) | {
    "step_scheduler_with_optimizer": True,
    "device_placement": True,
    "cpu": False,
}
"""Default values of the arguments that a run does not take."""


class Accelerator(Processes):
    """Takes a script's model, optimizer, DataLoaders and scheduler, and trains them as a run of Undula.

    The script sees as many processes as the plan has virtual workers, whatever the number of workers is.

    Args:
        mixed_precision: "no", "fp16" or "bf16"; by default, what `accelerate launch` was asked for, or `precision.compute` of the job.
        gradient_accumulation_steps: Number of batches of each virtual worker in a step.
        step_scheduler_with_optimizer: True, because the run advances the scheduler in each step.
        split_batches: Whether the virtual workers share a batch of a DataLoader, instead of taking one each.
        dataloader_config: DataLoaderConfiguration of Accelerate, whose `split_batches` counts; the plan decides the rest.
        others: Other arguments of Accelerate's class, which are refused unless they have no effect in a run or their default values.

    Raises:
        UsageError: The run cannot do what an argument asks for, or the script was not launched.
    """

    def __init__(
        self,
        *,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        step_scheduler_with_optimizer: bool = True,
        split_batches: bool = False,
        dataloader_config: Any = None,
        **others: Any,
    ):
        others["step_scheduler_with_optimizer"] = step_scheduler_with_optimizer
        others["kwargs_handlers"] = [
            each for each in others.get("kwargs_handlers") or () if not _is_harmless(each)
        ] or None
        if others.get("log_with") in ("tensorboard", ["tensorboard"]):
            others["log_with"] = None
        refuse_arguments("Accelerator", others, DEFAULTS, ACCELERATOR_ARGUMENTS)
        if dataloader_config is not None:
            split_batches |= dataloader_config.split_batches
            if not dataloader_config.even_batches:
                raise UsageError(
                    "Accelerator got a dataloader_config with even_batches=False; leave it True, the plan decides what an uneven step has"
                )
        if place().run is None:
            refuse_launched(os.environ)
            launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
            mixed_precision = launched if mixed_precision is None and launched != "no" else mixed_precision
        if mixed_precision not in (None, *PRECISIONS):
            raise UsageError(
                f"Accelerator got mixed_precision={mixed_precision!r}; set it to one of {', '.join(map(repr, PRECISIONS))}"
            )
        super().__init__(place())
        self._compute = self._run.compute if self._run else PRECISIONS[mixed_precision or "no"]
        self.mixed_precision = next(name for name, compute in PRECISIONS.items() if compute == self._compute)
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.split_batches = split_batches
        self._precision = PRECISIONS[mixed_precision] if mixed_precision else None
        self._model: nn.Module | None = None
        self._optimizer: PreparedOptimizer | None = None
        self._scheduler: PreparedScheduler | None = None
        self._training: TrainingLoader | None = None
        self._numbers = itertools.count()
        self._registered: list[Any] = []
        self._is_unfinished = False

    @property
    def sync_gradients(self) -> bool:
        """Whether the optimizer takes a step with the current batch. Each rank has several batches in a step."""
        return self._steps is None or self._steps.sync_gradients

    @property
    def optimizer_step_was_skipped(self) -> bool:
        return self._optimizer is not None and self._optimizer.step_was_skipped

    def __getattr__(self, name: str) -> Any:
        if name in ACCELERATOR:
            raise UsageError(f"accelerator.{name} is not possible in a run; {ACCELERATOR[name]}")
        # Python's own protocols need an AttributeError.
        raise AttributeError(f"the Accelerator of undula.adapters.accelerate has no attribute {name!r}")

    def prepare(self, *objects: Any) -> Any:
        """Take the model, the optimizer, the DataLoaders and the scheduler, in any order and in any number of calls.

        The first DataLoader is the one that trains; the others evaluate. Other objects are returned as they are.

        Raises:
            UsageError: The run cannot use an object.
        """
        prepared = [self._prepared(given) for given in objects]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepared(self, given: Any) -> Any:
        if isinstance(given, PreparedLoader | PreparedOptimizer | PreparedScheduler) or given is self._model:
            return given
        if isinstance(given, nn.Module):
            _require_first(self._model, "model; combine several modules into one")
            self._model = given
            return given
        if isinstance(given, torch.optim.Optimizer):
            _require_first(self._optimizer, "optimizer; use one optimizer with several parameter groups")
            self._optimizer = PreparedOptimizer(given)
            return self._optimizer
        if isinstance(given, ReduceLROnPlateau):
            raise UsageError(
                "accelerator.prepare() got a ReduceLROnPlateau, which needs a metric at each of its steps; use a scheduler that depends on "
                "the number of steps only"
            )
        if isinstance(given, LRScheduler):
            _require_first(self._scheduler, "scheduler")
            self._scheduler = PreparedScheduler(given, 1 if self.split_batches else self.num_processes)
            return self._scheduler
        if isinstance(given, DataLoader):
            return self._prepared_loader(given)
        if isinstance(given, IterableDataset):
            check_indexed(given, "accelerator.prepare() got", storing="use undula.main")
        return given

    def _prepared_loader(self, loader: "DataLoader[Any]") -> PreparedLoader:
        if self._training is None:
            self._training = TrainingLoader(
                loader, self.num_processes, self.split_batches, self.gradient_accumulation_steps
            )
            return self._training
        return EvaluationLoader(
            loader,
            self.num_processes,
            self.split_batches,
            None if self._steps else next(self._numbers),
            self._run.world_size if self._run else self.num_processes,
            self._evaluations,
            lambda: self._run_between_steps("a DataLoader for evaluation"),
        )

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Make objects with `state_dict` and `load_state_dict` part of the run's state; values are numbers, strings, or lists of these.

        Raises:
            UsageError: The training has begun.
        """
        if self._steps:
            raise UsageError(
                "accelerator.register_for_checkpointing() was called after accelerator.epochs(), which restores the state; call it before"
            )
        self._registered += objects

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count` epochs. Iterate over the training DataLoader once in each of them.

        A group of workers that continues begins with the epoch in which the last one has ended, at its next step. If that group ended after
        the last step of an epoch, but before the script asked for the next epoch, its work after the training is repeated.

        The script may leave the loop after the last step of an epoch, on all ranks. The run ends then as soon as the main function returns.

        Raises:
            UsageError: The script has not prepared all that the run needs, or the run cannot use it.
        """
        training, model, optimizer = self._training, self._model, self._optimizer
        if training is None or model is None or optimizer is None:
            needed = {"model": model, "optimizer": optimizer, "training DataLoader": training}
            missing = next(what for what, prepared in needed.items() if prepared is None)
            raise UsageError(f"accelerator.epochs() was called before accelerator.prepare() got a {missing}")

        def give(run: Run) -> None:
            loader = training.loader
            run.dataset(training.dataset, collate_fn=loader.collate_fn, num_workers=loader.num_workers)
            placed(run, model, optimizer.optimizer)

        if self._run is None:
            refuse_counted_steps(sys._getframe(1))
            refuse_number_of_workers_in_loops(sys._getframe(1).f_code, "accelerator.num_processes")
            if "plan.max_steps" not in place().given:
                refuse_break(sys._getframe(1))
            raise Offer({**training.settings(), **self._settings(count, optimizer)}, give)
        give(self._run)
        return self._epochs(self._run, training, model, optimizer)

    def _settings(self, epochs: int, optimizer: PreparedOptimizer) -> dict[str, Setting]:
        group = optimizer.param_groups[0]
        values: dict[str, tuple[Any, str]] = {
            "plan.epochs": (epochs, "accelerator.epochs() of the script"),
            "schedule.base_lr": (float(group.get("initial_lr", group["lr"])), "the optimizer of the script"),
        }
        if self._scheduler is None:
            if "initial_lr" in group:
                raise UsageError(
                    "the optimizer has a scheduler that accelerator.prepare() did not get; pass it to accelerator.prepare(), because the "
                    "run sets the learning rate in each step"
                )
            values["schedule.decay"] = "constant", "the script, which has no scheduler,"
        if self._precision is not None:
            values["precision.compute"] = self._precision, "mixed_precision of the script or of accelerate launch"
        return {key: Setting(value, origin) for key, (value, origin) in values.items()}

    def _epochs(
        self, run: Run, training: TrainingLoader, model: nn.Module, optimizer: PreparedOptimizer
    ) -> Iterator[int]:
        scheduler, at_end = self._scheduler, place().at_end
        run.optimizer(optimizer.optimizer, scheduler.of_run() if scheduler else None)
        run.state("accelerate", lambda: [registered.state_dict() for registered in self._registered], self._restore)
        once_more = partial(last_batch, run, training.loader), partial(undone, model, self._registered)
        steps = Steps(run, model, self.gradient_accumulation_steps > 1, scheduler is not None, *once_more)
        self._steps = optimizer.steps = steps
        if scheduler:
            scheduler.steps = steps
        for epoch in steps.epochs(self._is_unfinished):
            training.batches = lambda epoch=epoch: steps.of_epoch(epoch)
            try:
                yield epoch
            except GeneratorExit:  # the script has left the loop; after an exception, its main function does not return
                at_end.append(partial(steps.stop, epoch))
                raise
            steps.require_end_of(epoch)
        training.batches = None
        steps.end()

    def _restore(self, states: list[Any], is_unfinished: bool) -> None:
        self._is_unfinished = is_unfinished
        for registered, state in zip(self._registered, states, strict=False):
            registered.load_state_dict(state)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Surround the work on a batch, which ends a step of the optimizer if it is the last one of the step."""
        steps = self._begun("accelerator.accumulate()")
        steps.is_accumulating = steps.has_accumulated = True
        try:
            yield
        finally:
            steps.is_accumulating = False

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context in which operations outside of the model compute in the format of the job."""
        dtype = dtype_of(self._compute)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def backward(self, loss: Tensor, **more: Any) -> None:
        """Compute the gradient of a batch. The loss is the mean over the batch's samples, as everywhere in Accelerate.

        Raises:
            UsageError: It was computed before, or `more` has arguments of torch's `backward` that would make another one.
        """
        refuse_backward(more)
        self._begun("accelerator.backward()").backward(loss)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradient of the step after its last batch; do nothing before.

        Returns:
            Norm of the gradient before clipping, a scalar, which may be used if the call stands below `if accelerator.sync_gradients`.

        Raises:
            UsageError: The norm is another than the Euclidean one of all parameters, or is used for other batches.
        """
        return self._begun("accelerator.clip_grad_norm_()").reduce(parameters, max_norm, norm_type)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: object = None) -> None:
        """Record numbers at the step of the run, whatever `step` is.

        For a batch, values that are logged before `optimizer.step()` are averaged over the samples of the step, in its row of the ledger.
        Values that are logged after it become an event, because the step may be committed by then: their mean over the samples of rank 0 in
        the step. Values that are logged between two steps become an event as they are.

        Raises:
            UsageError: A value is no number.
        """
        self._begun("accelerator.log()").log(values)

    def init_trackers(self, project_name: str, config: object = None, init_kwargs: object = None) -> None:
        """Do nothing, because the job has the trackers: what `log` gets is in the ledger, on TensorBoard and in these trackers."""

    def end_training(self) -> None:
        """Do nothing, because a run ends with its last epoch."""

    def free_memory(self, *objects: Any) -> Any:
        """Return the objects, as Accelerate does. The run frees what it holds when it ends."""
        return objects[0] if len(objects) == 1 else list(objects)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        return model

    def save_state(self, output_dir: object = None) -> None:
        """Ask for a checkpoint at the next end of a step, in the run directory, from where the run resumes by itself."""
        self._run_between_steps("accelerator.save_state()").save()


def _require_first(prepared: object, what: str) -> None:
    """Check that `prepare` has got no other object of a kind.

    Raises:
        UsageError: It has.
    """
    if prepared is not None:
        raise UsageError(f"accelerator.prepare() got a second {what}, because a run has one")


def _is_harmless(handler: Any) -> bool:
    """Return whether a handler of Accelerate is about processes alone, and not about what they compute."""
    if type(handler).__name__ == "DistributedDataParallelKwargs":
        return str(handler.comm_hook.value) == "no"
    return type(handler).__name__ == "InitProcessGroupKwargs"
