"""Hugging Face's Trainer under the loop of a run.

The computation of losses, collation, callbacks, evaluation, logging, saving and schedules is Hugging Face's own code. The run decides the
samples of each step, reduces and clips the gradient, commits the step, and holds the state. To this end, methods are overridden that are
private in transformers (trainer.py of the versions that the extra `transformers` names). Parts that some of these versions lack are in
older.py.
"""

import inspect
import math
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import filterfalse
from typing import Any

import torch
import transformers
from accelerate.utils import TorchDynamoPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.trainer_utils import TrainOutput

from undula.adapters.evaluation import RankBatches, kept_loader
from undula.adapters.gathered import metrics_of_batch, open_batch, plain, refuse_gathered
from undula.adapters.own_tensors import OwnTensors
from undula.adapters.refusals import refuse_backward
from undula.adapters.script import Offer, place
from undula.adapters.transformers.arguments import job_settings, refuse_unsupported
from undula.adapters.transformers.library import (
    IN_EVALUATION,
    LogHistory,
    PlannedBatches,
    check_data,
    evaluated,
    exported_state,
    found_checkpoint,
    gather_root,
    gathered_in_evaluation,
    is_of_datasets,
    logged_by_script,
    place_process,
    refuse_overrides,
    require_begun,
    require_on_all_ranks,
    shared_folder,
)
from undula.adapters.transformers.older import OlderLoop
from undula.data.script.dataset import fingerprint_of
from undula.data.script.loader_processes import Loader
from undula.errors import SpecError, UsageError
from undula.parallel.recompute import kept_random_state
from undula.parallel.sharding import problem_of_optimizer
from undula.train.run import Run
from undula.train.step import Step
from undula.train.whole_weights import WholeWeights, placed

STATE_FIELDS = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_model_checkpoint", "best_global_step"),
)
"""Fields of a TrainerState that belong to the state of a run, besides its history."""
COUNTERS = (
    *("current_flos", "_total_loss_scalar", "_globalstep_last_logged", "_grad_norm", "_learning_rate"),
    "_start_time",  # the mean loss and the speed at the end are those of the whole run
)
"""Attributes of the trainer that belong to the state of a run."""
HAS_PARTS = hasattr(transformers.Trainer, "_finalize_training")
_Base: Any = object if HAS_PARTS else OlderLoop  # of type Any, as a type checker knows no class of Hugging Face


class ElasticMixin(_Base):  # type: ignore[misc]
    """Makes a class that derives from Hugging Face's Trainer elastic: `class MyTrainer(ElasticMixin, TheirTrainer)`."""

    control: Any
    _created_lr_scheduler: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator so that this process is one of as many as there are virtual workers, and reduces nothing by itself."""
        here, args = place(), self.args
        refuse_overrides(type(self), ElasticMixin)
        refuse_unsupported(args, here.virtual_workers)
        args.save_only_model = True  # the run's own checkpoints have the rest
        if here.run is not None:
            args.output_dir = shared_folder(args.output_dir, here.run)
        place_process(args, here)
        # The precision and the compilation are the run's. Older versions of transformers have the precision in the environment.
        args.mixed_precision = os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        super().create_accelerator_and_postprocess()
        self.accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend="no")
        place_process(args, here)
        self.accelerator.backward = self._backward
        self.accelerator.gather = self.accelerator.gather_for_metrics = self.gather_function = self._gather
        self.accelerator.reduce = self._reduce
        # What is gathered need not be of one size.
        self.accelerator.pad_across_processes = lambda tensor, *_, **__: tensor
        self._weights: WholeWeights | None = None
        self._step: Step | None = None
        self._evaluated: RankBatches | None = None
        # Loader processes keep the datasets that the trainer has when it begins to train, in every group.
        self._kept_datasets: dict[str, Any] = {}
        self._grad_norm = self._learning_rate = 0.0
        self._is_unfinished = self._is_restored = self._has_begun = False
        self._history = LogHistory()

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **more: Any) -> TrainOutput:
        """Train as Hugging Face's Trainer does, from the newest state of the run, or give the settings to the job in the driver.

        Raises:
            SpecError: An argument is given that a run does not support.
        """
        if trial is not None:
            raise SpecError("Trainer.train() got trial, which a run does not support; start a study of it")
        self._found = found_checkpoint(resume_from_checkpoint, self.args.output_dir)
        self._offer_in_driver()
        return super().train(**more)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Leave a model that the run shards where it is, because it may not fit on the device as a whole."""
        if (run := place().run) is None or not run.sharding_stage:
            super()._move_model_to_device(model, device)

    def evaluate(self, *arguments: Any, **more: Any) -> dict[str, float]:
        self._begin_evaluation()
        with kept_random_state():
            return dict(super().evaluate(*arguments, **more))

    def predict(self, *arguments: Any, **more: Any) -> Any:
        self._begin_evaluation()
        with kept_random_state():
            return super().predict(*arguments, **more)

    def _begin_evaluation(self) -> None:
        self._offer_in_driver()
        self._evaluated = None
        if (run := place().run) is not None and run.sharding_stage and self._weights is None:
            self._give(run)

    def prediction_step(self, model: nn.Module, *arguments: Any, **more: Any) -> Any:
        """Predict for a batch. Generation calls parts of a sharded model by themselves, whose weights outside of units it needs before."""
        if isinstance(model, FSDPModule):
            gather_root(model)
        return super().prediction_step(model, *arguments, **more)

    def hyperparameter_search(self, *arguments: Any, **more: Any) -> Any:
        raise SpecError("Trainer.hyperparameter_search() does not run in a job; start a study of it (docs/studies.md)")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model in Hugging Face's format. Rank 0 writes it, and may call this alone; in a step's save, the others wait."""
        if (run := place().run) is not None:
            run.alive()
        with self._weights.gathered() if self._weights else nullcontext():
            super().save_model(output_dir, _internal_call)
        if run is not None and _internal_call:
            run.gather(None)  # waits for all ranks

    def _offer_in_driver(self) -> None:
        """End the script in the driver, which then knows what the job needs."""
        here = place()
        if here.run is not None:
            return
        if self.train_dataset is None:
            raise SpecError("the Trainer has no train_dataset, but a job trains; give it one")
        check_data(self.train_dataset, self.eval_dataset, self.data_collator)
        size = len(self.train_dataset)
        settings = job_settings(self.args, size, here.virtual_workers, self.optimizer) if size else {}
        if here.given.get("sharding.stage"):
            self.create_optimizer()
            if problem := problem_of_optimizer(self.optimizer):
                raise SpecError(problem)
        raise Offer(settings, self._give)

    def _give(self, run: Run) -> None:
        """Give the dataset and the model to a run."""
        dataset, collate = self._data(self.train_dataset, "training")
        name = fingerprint_of(self.train_dataset)  # without columns, it depends on the order of a set
        run.dataset(dataset, collate_fn=collate, num_workers=self.args.dataloader_num_workers, name=name)
        self.model_wrapped = placed(run, self.model, self.optimizer)
        self.accelerator._models.append(self.model_wrapped)  # an evaluation would prepare it otherwise
        self._weights = WholeWeights(self.model, run)

    def _data(self, dataset: Any, description: str) -> tuple[Any, Any]:
        """Return a dataset and a collate function without the columns that the model does not take."""
        if is_of_datasets(dataset):
            return self._remove_unused_columns(dataset, description=description), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator, description=description)

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, **more: Any) -> Any:
        """Return the batches of an evaluation."""
        run = place().run
        assert run is not None
        data, collate = self._data(dataset, description)
        name = next((name for name, kept in self._kept_datasets.items() if kept is dataset), None)
        loader = kept_loader(run, name, self.args.dataloader_num_workers) if name is not None else Loader(0)
        self._evaluated = RankBatches(run, data, collate, batch_size, loader)
        return self._evaluated

    def _gather(self, value: Any, use_gather_object: bool = False) -> Any:
        """Return the tensors of a batch of each rank, joined in the order of the dataset; in a step, those of the batch itself."""
        if self._step is not None:
            return metrics_of_batch(value)
        return gathered_in_evaluation(self._evaluated if place().run else None, value)

    def _reduce(self, value: Any, *_: Any, **__: Any) -> Any:
        """Return the tensors of a batch, for metrics of a step."""
        if self._step is None:
            raise UsageError(f"accelerator.reduce() was called outside of a step of the trainer; {IN_EVALUATION}")
        return metrics_of_batch(value)

    def _backward(self, loss: Tensor, **more: Any) -> None:
        """Run the backward pass of a micro-batch with its share of the step's loss."""
        assert self._step is not None
        refuse_backward(more)
        refuse_gathered(loss)
        self._step.backward(loss, share=self._share)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        """Return the number of items, such as tokens with a label, in a step over all ranks; None if losses are means over samples.

        In an evaluation it is the number of a batch, so that its loss does not depend on the batches of other ranks.
        """
        if not (self.model_accepts_loss_kwargs or self.compute_loss_func is not None):
            return None
        self.accelerator.gather = lambda value: value  # it is summed here
        try:
            items = super()._get_num_items_in_batch(batch_samples, device)
        finally:
            self.accelerator.gather = self._gather
        if self._step is None:
            # `compute_loss` multiplies by the number of processes, because DDP would divide by it.
            return None if items is None else items * place().virtual_workers
        total = self._step.total(0.0 if items is None else float(items))
        is_counted = total > 0 or self._step.total(float(items is not None)) > 0
        return torch.tensor(total, dtype=torch.float32, device=device) if is_counted else None

    def _inner_training_loop(
        self, batch_size: Any = None, args: Any = None, ignore_keys_for_eval: Any = None, **_: Any
    ) -> TrainOutput:
        """Train the steps that are left, with the callbacks of Hugging Face's own loop in its order."""
        run = place().run
        assert run is not None
        if self._weights is None:
            self._give(run)
        self._kept_datasets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval": self.eval_dataset}
        num_train_samples = self._prepare(run, args)
        run.state("transformers", self._captured, self._restore)
        self._loop(run, self.model_wrapped, ignore_keys_for_eval)
        assert self._weights is not None
        self._weights.end(self.state.global_step)
        return self._finalize_training(None, num_train_samples, self._start_time)

    def _prepare(self, run: Run, args: Any) -> float:
        """Make the optimizer, the scheduler and the trainer's state, and return the number of samples of the whole training."""
        plan, accumulation = run.plan, args.gradient_accumulation_steps
        per_process = plan.spec.virtual_workers * args.per_device_train_batch_size
        num_batches = plan.steps_per_epoch * accumulation
        if not args.dataloader_drop_last:
            num_batches = -(-len(self.train_dataset) // per_process)
        batches = PlannedBatches(self.train_dataset, num_batches)
        batch = per_process * accumulation
        parameters = inspect.signature(self.set_initial_training_values).parameters
        given = (args, batches, batch) if "total_train_batch_size" in parameters else (args, batches)
        epochs, per_epoch, _, num_train_samples, _, self._batches_per_epoch, max_steps = (
            self.set_initial_training_values(*given)
        )
        if (plan.spec.global_batch, plan.total_steps) != (batch, max_steps):
            raise UsageError(
                f"the TrainingArguments ask for {max_steps} steps of {batch} samples, but the plan has {plan.total_steps} of "
                f"{plan.spec.global_batch}; give the same arguments in every process, and start the script with `undula run`"
            )
        self._init_training_state(max_steps, per_epoch, epochs, None, None)
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        run.optimizer(self.optimizer, self.lr_scheduler)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = batches
        self._initial_num_input_tokens_seen = self._initial_global_step = 0
        self._tr_loss = torch.tensor(0.0, device=args.device)
        self._total_loss_scalar, self._globalstep_last_logged = 0.0, 0
        return float(num_train_samples)

    def _loop(self, run: Run, model: nn.Module, ignore_keys_for_eval: Any) -> None:
        args, epoch = self.args, None
        self._start_time = run.gather(time.time())[0]
        run.restore()  # before callbacks see the state
        require_begun(self._found, self._is_restored)
        self._has_begun = True
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start and not self._is_restored:
            self._evaluate(None, ignore_keys_for_eval, skip_scheduler=True)
        if self._is_unfinished:
            self._after_step(run, model, self.state.global_step, ignore_keys_for_eval)
        own = OwnTensors(model, [self, *filterfalse(exported_state, self.callback_handler.callbacks)], ["_tr_loss"])
        own.take()
        # A loop that has begun counts the work after the last step as done, and ends if no step is left.
        for step in run.steps():
            if (number := run.plan.step(step.index).epoch) != epoch:
                epoch = number
                self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
            self._train_step(run, step, model)
            own.after_step(step.index, run.warn_of_state)
            self._after_step(run, model, step.index, ignore_keys_for_eval)

    def _train_step(self, run: Run, step: Step, model: nn.Module) -> None:
        args, self._step = self.args, step
        samples = step.load()
        items = self._get_num_items_in_batch(samples, args.device)
        # A step's loss is weighted by samples, and not divided by the number of micro-batches.
        self.current_gradient_accumulation_steps = 1
        self._share = 1 / run.plan.spec.virtual_workers if self._is_normalized(items) else None
        self._step_flos = step.total(sum(float(self.floating_point_ops(inputs)) for inputs in samples))
        for number, inputs in enumerate(step.batches()):
            is_last = number >= len(samples) - 1
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            if number == 0:
                self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
            with open_batch():
                self.training_step(model, inputs, items)
            if not is_last:
                self.control = self.callback_handler.on_substep_end(args, self.state, self.control)
        norm = step.reduce()
        self.control = self.callback_handler.on_pre_optimizer_step(args, self.state, self.control)
        self._learning_rate, self._grad_norm = self._get_learning_rate(), float(norm)
        step.update()
        self.control = self.callback_handler.on_optimizer_step(args, self.state, self.control)

    def _is_normalized(self, items: Tensor | None) -> bool:
        """Return whether a micro-batch's loss is already its part of the step's loss, as `training_step` decides it."""
        # The class of a script may have this where Hugging Face's does not.
        if (stated := getattr(self, "loss_is_scaled_for_ga", None)) is not None:
            return bool(stated)
        return (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None

    def _after_step(self, run: Run, model: nn.Module, index: int, ignore_keys_for_eval: Any) -> None:
        """Do what follows from a committed step: callbacks, and logging, evaluation and saving if they are due."""
        self._add_step()
        args, plan, shape = self.args, run.plan, run.plan.step(index)
        in_epoch = min((shape.step_in_epoch + 1) * args.gradient_accumulation_steps, self._batches_per_epoch)
        self.state.global_step, self.state.epoch = index + 1, shape.epoch + in_epoch / self._batches_per_epoch
        self.control = self.callback_handler.on_step_end(args, self.state, self.control)
        if index + 1 == run.last_step < plan.total_steps:  # a smoke test does now what is due later
            self.control.should_evaluate |= args.eval_strategy != "no"
            self.control.should_save |= args.save_strategy != "no"
        due = (self._tr_loss, self._grad_norm, model, None, shape.epoch, ignore_keys_for_eval, self._start_time)
        self._maybe_log_save_evaluate(*due, learning_rate=self._learning_rate)
        is_epoch = shape.step_in_epoch + 1 == plan.steps_per_epoch
        if self.control.should_epoch_stop and not is_epoch:
            raise UsageError(
                "a callback set control.should_epoch_stop, but the plan of a run decides where epochs end; set should_training_stop"
            )
        if is_epoch or self.control.should_training_stop:
            self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
            self._maybe_log_save_evaluate(*due, learning_rate=self._learning_rate)
        if self.control.should_training_stop and self.state.global_step < plan.total_steps:
            run.stop("a callback of the script stopped the training")

    def _add_step(self) -> None:
        """Add the loss and the operations of the step to the totals, once it is committed."""
        step = self._step
        if step is None or step.loss is None:
            return
        self._step = None
        if self.args.logging_nan_inf_filter and not math.isfinite(step.loss):
            self._tr_loss += self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        else:
            self._tr_loss += step.loss
        self.current_flos += self._step_flos

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        """Evaluate during the training, and record the metrics in the run: as a validation, or as numbers if there are several datasets."""
        metrics: dict[str, float] = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        run = place().run
        if run is not None and self._evaluated is not None:
            means = evaluated(metrics)
            if "eval_loss" in metrics:
                run.validated(means, len(self._evaluated.dataset))
            else:
                run.log(means)
        return metrics

    def log(self, *arguments: Any, **more: Any) -> None:
        """Log as Hugging Face's Trainer does. What a script or a library adds to its numbers is recorded in the run as well."""
        known = len(self.state.log_history)
        super().log(*plain(arguments), **plain(more))
        for entry in self.state.log_history[known:]:
            if (run := place().run) is not None and self._has_begun and (own := logged_by_script(entry)):
                run.log(own)

    def _load_best_model(self) -> None:
        """Load the best model after the run, on all ranks."""
        require_on_all_ranks(self.state.best_model_checkpoint, place().run)
        super()._load_best_model()

    def _captured(self) -> dict[str, Any]:
        """Return the state of the trainer and of its callbacks that belongs to the run's."""
        self._add_step()
        return {
            "fields": {name: plain(getattr(self.state, name)) for name in STATE_FIELDS},
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "loss": float(self._tr_loss),
            "history": self._history.of(self.state.log_history),
            "callbacks": [exported_state(callback) for callback in self.callback_handler.callbacks],
        }

    def _restore(self, values: Mapping[str, Any], is_unfinished: bool) -> None:
        self._is_restored, self._is_unfinished = True, is_unfinished
        callbacks = zip(self.callback_handler.callbacks, values["callbacks"], strict=False)
        for owner, attributes in ((self.state, values["fields"]), (self, values["counters"]), *callbacks):
            for name, value in attributes.items():
                setattr(owner, name, value)
        self._tr_loss.fill_(values["loss"])
        self.state.log_history = self._history.restore(values["history"])


class Trainer(ElasticMixin, transformers.Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer on workers that come and go. It takes the same arguments, and trains the same model at any world size."""
