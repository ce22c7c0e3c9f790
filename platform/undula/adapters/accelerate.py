"""A stand-in for Hugging Face Accelerate's `Accelerator`, with which a loop that was written for it trains elastically.

from undula.adapters.accelerate import Accelerator, launch      # in place of accelerate's
...
for epoch in accelerator.epochs(num_epochs):                    # in place of range(num_epochs)
...
launch(main)                                                    # in place of main()
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from undula.adapters.accelerate_files import weights_of, write
from undula.adapters.accelerate_launch import launch
from undula.adapters.accelerate_loaders import EvaluationLoader, PreparedLoader, TrainingLoader, merged, padded
from undula.adapters.accelerate_refusals import refuse_arguments, refused_attribute, require_first
from undula.adapters.accelerate_steps import AdvancedByRun, PreparedOptimizer, PreparedScheduler, Steps
from undula.adapters.script import Offer, place
from undula.config.yaml_file import Setting
from undula.data.nested import with_tensors
from undula.data.script.dataset import check_indexed
from undula.errors import UsageError
from undula.parallel.precision import dtype_of
from undula.plan.precision import Compute
from undula.train.run import Run

__all__ = ["Accelerator", "launch"]

PRECISIONS: Mapping[str, Compute] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
"""Values of `precision.compute` by those of `mixed_precision`."""


class Accelerator:
    """Takes a script's model, optimizer, DataLoaders and scheduler, and trains them as a run of Undula.

    The script sees as many processes as the plan has virtual workers, whatever the number of workers is.

    Args:
        mixed_precision: "no", "fp16" or "bf16"; by default, `precision.compute` of the job.
        gradient_accumulation_steps: Number of batches of each virtual worker in a step.
        step_scheduler_with_optimizer: True, because the run advances the scheduler in each step.
        split_batches: Whether the virtual workers share a batch of a DataLoader, instead of taking one each.
        others: Other arguments of Accelerate's class, all of which are refused unless they have their default values.

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
        **others: object,
    ):
        refuse_arguments({**others, "step_scheduler_with_optimizer": step_scheduler_with_optimizer})
        if mixed_precision not in (None, *PRECISIONS):
            raise UsageError(
                f"Accelerator got mixed_precision={mixed_precision!r}; set it to one of {', '.join(map(repr, PRECISIONS))}"
            )
        here = place()
        self._run: Run | None = here.run
        self.num_processes = here.virtual_workers
        self.process_index = here.rank
        self.device = here.run.device if here.run else torch.device("cpu")
        self._compute = here.run.compute if here.run else PRECISIONS[mixed_precision or "no"]
        self.mixed_precision = next(name for name, each in PRECISIONS.items() if each == self._compute)
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.split_batches = split_batches
        self._precision = PRECISIONS[mixed_precision] if mixed_precision else None
        self._model: nn.Module | None = None
        self._optimizer: PreparedOptimizer | None = None
        self._scheduler: PreparedScheduler | None = None
        self._training: TrainingLoader | None = None
        self._evaluations: list[EvaluationLoader] = []
        """DataLoaders that are being iterated over."""
        self._numbers = itertools.count()
        self._registered: list[Any] = []
        self._is_unfinished = False
        self._steps: Steps | None = None

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    is_local_main_process = is_main_process

    @property
    def sync_gradients(self) -> bool:
        """Whether the optimizer takes a step with the current batch. Each rank has several batches in a step."""
        step = self._steps.step if self._steps else None
        return step is None or step.is_last

    @property
    def optimizer_step_was_skipped(self) -> bool:
        return self._optimizer is not None and self._optimizer.step_was_skipped

    def __getattr__(self, name: str) -> Any:
        raise refused_attribute(name)

    def prepare(self, *objects: Any) -> Any:
        """Take the model, the optimizer, the DataLoaders and the scheduler, in any order and in any number of calls.

        The first DataLoader is the one that trains; the others evaluate. Other objects are returned as they are.

        Raises:
            UsageError: The run cannot use an object.
        """
        prepared = [self._prepared(each) for each in objects]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepared(self, each: Any) -> Any:
        if isinstance(each, PreparedLoader | PreparedOptimizer | PreparedScheduler) or each is self._model:
            return each
        if isinstance(each, nn.Module):
            require_first(self._model, "model; combine several modules into one")
            self._model = each
            return each
        if isinstance(each, torch.optim.Optimizer):
            require_first(self._optimizer, "optimizer; use one optimizer with several parameter groups")
            self._optimizer = PreparedOptimizer(each)
            return self._optimizer
        if isinstance(each, ReduceLROnPlateau):
            raise UsageError(
                "accelerator.prepare() got a ReduceLROnPlateau, which needs a metric at each of its steps; use a scheduler that depends on "
                "the number of steps only"
            )
        if isinstance(each, LRScheduler):
            require_first(self._scheduler, "scheduler")
            self._scheduler = PreparedScheduler(each, 1 if self.split_batches else self.num_processes)
            return self._scheduler
        if isinstance(each, DataLoader):
            return self._prepared_loader(each)
        if isinstance(each, IterableDataset):
            check_indexed(each, "accelerator.prepare() got", storing="use undula.main")
        return each

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

        Raises:
            UsageError: The script has not prepared all that the run needs, or the run cannot use it.
        """
        needed = {"model": self._model, "optimizer": self._optimizer, "training DataLoader": self._training}
        for what, found in needed.items():
            if found is None:
                raise UsageError(f"accelerator.epochs() was called before accelerator.prepare() got a {what}")
        if self._run is None:
            raise Offer(self._settings(count), self._give)
        return self._epochs(self._run)

    def _settings(self, epochs: int) -> dict[str, Setting]:
        assert self._training is not None
        assert self._optimizer is not None
        group = self._optimizer.param_groups[0]
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
            values["precision.compute"] = self._precision, "Accelerator(mixed_precision=...) of the script"
        return {
            **self._training.settings(),
            **{key: Setting(value, origin) for key, (value, origin) in values.items()},
        }

    def _give(self, run: Run) -> None:
        assert self._training is not None
        assert self._model is not None
        loader = self._training.loader
        run.dataset(self._training.dataset, collate_fn=loader.collate_fn, num_workers=loader.num_workers)
        run.model(self._model)

    def _epochs(self, run: Run) -> Iterator[int]:
        training, model, optimizer, scheduler = self._training, self._model, self._optimizer, self._scheduler
        assert training is not None
        assert model is not None
        assert optimizer is not None
        self._give(run)
        # The run uses only the methods of a scheduler that this object has.
        run.optimizer(optimizer.optimizer, cast(LRScheduler, AdvancedByRun(scheduler)) if scheduler else None)
        run.state("accelerate", lambda: [each.state_dict() for each in self._registered], self._restore)
        accumulates = self.gradient_accumulation_steps > 1
        steps = self._steps = optimizer.steps = Steps(run, model, accumulates, scheduler is not None)
        if scheduler:
            scheduler.steps = steps
        for epoch in steps.epochs(self._is_unfinished):
            training.batches = lambda epoch=epoch: steps.of_epoch(epoch)
            yield epoch
            steps.require_end_of(epoch)
        training.batches = None
        steps.end()

    def _restore(self, states: list[Any], is_unfinished: bool) -> None:
        self._is_unfinished = is_unfinished
        for each, state in zip(self._registered, states, strict=False):
            each.load_state_dict(state)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Surround the work on a batch, which ends a step of the optimizer if it is the last one of the step."""
        steps = self._begun("accelerator.accumulate()")
        steps.is_accumulating = True
        try:
            yield
        finally:
            steps.is_accumulating = False

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context in which operations outside of the model compute in the format of the job."""
        dtype = dtype_of(self._compute)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradient of a batch. The loss is the mean over the batch's samples, as everywhere in Accelerate."""
        self._begun("accelerator.backward()").open("accelerator.backward()").backward(loss)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip the gradient of the step after its last batch, and return its norm; do nothing before.

        Raises:
            UsageError: The norm is another than the Euclidean one of all parameters.
        """
        return self._begun("accelerator.clip_grad_norm_()").reduce(parameters, max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all ranks as one, along their first dimension. All ranks call this between two steps.

        Raises:
            UsageError: A step is open, in which ranks have different numbers of batches.
        """
        run = self._run_between_steps("accelerator.gather()")
        found = merged(run.gather(with_tensors(tensor, lambda each: each.detach().cpu())))
        return with_tensors(found, lambda each: each.to(self.device))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the results of all ranks for their current evaluation batches as one, each sample once and in the dataset's order.

        Raises:
            UsageError: No evaluation batch is current.
        """
        if not self._evaluations:
            raise UsageError(
                "accelerator.gather_for_metrics() was called outside of the loop over a DataLoader for evaluation; call it there for each "
                "batch, because ranks without a batch of their own repeat one"
            )
        if use_gather_object and not isinstance(input_data, list):
            raise UsageError(
                "accelerator.gather_for_metrics(use_gather_object=True) needs a list with an object for each sample"
            )
        self._run_between_steps("accelerator.gather_for_metrics()")
        found = self._evaluations[-1].gathered(with_tensors(input_data, lambda each: each.detach().cpu()))
        return with_tensors(found, lambda each: each.to(self.device))

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the largest size that any rank has in a dimension. All ranks call this between two steps."""
        run = self._run_between_steps("accelerator.pad_across_processes()")
        return with_tensors(
            tensor,
            lambda each: (
                each if dim >= each.ndim else padded(each, dim, max(run.gather(each.shape[dim])), pad_index, pad_first)
            ),
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum of the tensors of all ranks. All ranks call this between two steps.

        Raises:
            UsageError: A step is open, or it is not a sum.
        """
        if reduction != "sum":
            raise UsageError(
                f"accelerator.reduce() got reduction={reduction!r}, but the number of ranks changes; sum the values and a count, and divide"
            )
        run = self._run_between_steps("accelerator.reduce()")
        everyone = run.gather(with_tensors(tensor, lambda each: each.detach().cpu()[None]))
        return with_tensors(merged(everyone), lambda each: each.sum(dim=0).to(self.device) * scale)

    def wait_for_everyone(self) -> None:
        """Wait until all ranks call this, outside of a step."""
        if self._run is None:
            return
        if self._steps and self._steps.step:
            self._run_between_steps("accelerator.wait_for_everyone()")
        self._run.gather(None)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let rank 0 run a block before the other ranks do, for example to fill a cache on a file system that they share."""
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does something on rank 0 only."""
        return lambda *arguments, **more: function(*arguments, **more) if self.is_main_process else None

    on_local_main_process = on_main_process

    def print(self, *arguments: object, **more: Any) -> None:
        """Print on rank 0."""
        if self._run and self.is_main_process:
            print(*arguments, **more)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: object = None) -> None:
        """Record numbers at the step of the run, whatever `step` is.

        Those of a batch before optimizer.step() are averaged over the samples of the step, in its row of the ledger. Those of a batch after
        it are averaged over the batches of rank 0 in the step, as an event, because the step may be committed. Others are an event.

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

    def get_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the weights of a model; those of a sharded one are on rank 0 alone. All ranks call this between two steps."""
        self._run_between_steps("accelerator.get_state_dict()")
        return weights_of(model)

    def save_model(self, model: nn.Module, save_directory: str | os.PathLike[str]) -> None:
        """Write the weights as `model.safetensors` on rank 0, and wait until it has. All ranks call this between two steps."""
        weights = self.get_state_dict(model)
        self.save(weights, Path(save_directory) / "model.safetensors", safe_serialization=True)
        self.wait_for_everyone()

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object on rank 0, as a whole or not at all."""
        if self.is_main_process:
            write(obj, Path(f), safe_serialization)

    def _begun(self, call: str) -> Steps:
        if self._steps is None:
            raise UsageError(
                f"{call} was used outside of `for epoch in accelerator.epochs(n)`; write the loop over epochs so, and use it there"
            )
        return self._steps

    def _run_between_steps(self, call: str) -> Run:
        if self._begun(call).step is not None:
            raise UsageError(
                f"{call} was used in an open step, in which ranks have different numbers of batches; use it after optimizer.step() if "
                "accelerator.sync_gradients, or after the loop over the training DataLoader"
            )
        assert self._run is not None
        return self._run
