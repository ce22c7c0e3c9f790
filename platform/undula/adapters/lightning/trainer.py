"""Stand-in for Lightning's Trainer in a script: its arguments become the plan, and its `fit` trains under the loop of a run."""

import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch

from undula.adapters.lightning.data import Data
from undula.adapters.lightning.fit import fit
from undula.adapters.lightning.goals import goals_of_settings
from undula.adapters.lightning.hooks import Hooks
from undula.adapters.lightning.library import Library
from undula.adapters.lightning.stand_in import FitTrainer
from undula.adapters.refusals import LIGHTNING_METHODS, LIGHTNING_TRAINER, refuse_arguments
from undula.adapters.script import Offer, Place, place
from undula.adapters.source import refuse_later
from undula.config.yaml_file import Setting
from undula.errors import UsageError
from undula.plan.plan import Plan, PlanSpec
from undula.plan.precision import Compute
from undula.train.run import Run
from undula.train.single_process import local_world

PRECISIONS: Mapping[object, Compute] = {
    "32-true": "fp32",
    "32": "fp32",
    32: "fp32",
    "bf16-mixed": "bf16",
    "bf16": "bf16",
    "16-mixed": "fp16",
    "16": "fp16",
    16: "fp16",
}
"""Values of `precision.compute` by those of `precision`."""
WITHOUT_EFFECT = {
    *(
        "accelerator",
        "devices",
        "num_nodes",
        "use_distributed_sampler",
        "benchmark",
        "inference_mode",
        "enable_checkpointing",
    ),
    *(
        "enable_progress_bar",
        "enable_model_summary",
        "enable_autolog_hparams",
        "num_sanity_val_steps",
        "log_every_n_steps",
    ),
    *("limit_test_batches", "limit_predict_batches", "default_root_dir", "model_registry"),
}
"""Arguments of Lightning's Trainer whose effect a run has, or does not need, whatever their value is."""
AFTERWARDS = ("callback_metrics", "current_epoch", "global_step", "max_epochs", "max_steps", "world_size", "callbacks")
"""Attributes of the trainer that a script may read after `fit`."""
MOST_EPOCHS = 1000
"""Number of epochs of Lightning's Trainer if the script limits neither epochs nor steps."""


class Trainer:
    """Takes the arguments of Lightning's Trainer, and trains its modules as a run of Undula.

    Args:
        max_epochs: Number of epochs.
        max_steps: Number of steps; -1 for those of all epochs.
        accumulate_grad_batches: Number of batches of each virtual worker in a step.
        gradient_clip_val: Maximum norm of the gradient; None, 0 or less for no limit.
        precision: Number format in which the module computes; by default, `precision.compute` of the job.
        deterministic: Whether torch uses only deterministic algorithms; by default, `deterministic` of the job.
        check_val_every_n_epoch: Number of epochs between validations, unless the job has `validation.every_steps`.
        val_check_interval: Part of an epoch, or number of batches, between validations.
        callbacks: Callbacks of the script.
        others: Other arguments of Lightning's class, which are refused if they would have an effect that a run does not have.

    Raises:
        UsageError: The run cannot do what an argument asks for.
    """

    def __init__(
        self,
        *,
        max_epochs: int | None = None,
        max_steps: int = -1,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        precision: str | int | None = None,
        deterministic: bool | str | None = None,
        check_val_every_n_epoch: int | None = 1,
        val_check_interval: int | float | None = None,
        callbacks: Any = None,
        **others: Any,
    ):
        known = inspect.signature(Library.of_script().trainer_class).parameters
        defaults = {name: parameter.default for name, parameter in known.items()}
        if isinstance(others.get("logger"), bool):
            del others["logger"]
        for name in ("min_epochs", "min_steps"):
            if others.get(name) in (0, 1):  # no run has fewer
                del others[name]
        unknown = dict.fromkeys(defaults.keys() - WITHOUT_EFFECT, "remove it, because Undula does not know it")
        refuse_arguments("Trainer", others, defaults, {**unknown, **LIGHTNING_TRAINER})
        if precision not in (None, *PRECISIONS):
            raise UsageError(
                f"Trainer got precision={precision!r}; set it to one of {', '.join(map(repr, PRECISIONS))}"
            )
        stated = {
            "plan.epochs": ("max_epochs", None if max_epochs == -1 else max_epochs),
            "plan.max_steps": ("max_steps", None if max_steps == -1 else max_steps),
            "gradient.max_norm": ("gradient_clip_val", max(gradient_clip_val or 0, 0) or None),
            "precision.compute": ("precision", PRECISIONS.get(precision)),
            "deterministic": ("deterministic", bool(deterministic) or None),
        }
        self._stated = {
            key: Setting(value, f"Trainer({argument}=...) of the script", f"{argument} of the Trainer")
            for key, (argument, value) in stated.items()
            if value is not None
        }
        if max_epochs == max_steps == -1:
            raise UsageError("Trainer got max_epochs=-1, which never ends; set max_epochs or max_steps")
        if (check_val_every_n_epoch or 1) > 1 and val_check_interval not in (None, 1.0):
            raise UsageError(
                f"Trainer got val_check_interval={val_check_interval!r} and check_val_every_n_epoch={check_val_every_n_epoch}, but a run "
                "validates at one interval; leave one of them out"
            )
        self._accumulation = accumulate_grad_batches
        self._val_epochs, self._val_interval = check_val_every_n_epoch, val_check_interval
        self._callbacks = callbacks if isinstance(callbacks, Sequence) else [callbacks] if callbacks else []

    _fitted: FitTrainer | None = None
    """What the module has found as `self.trainer`, after `fit`."""

    @property
    def is_global_zero(self) -> bool:
        return place().rank == 0

    def __getattr__(self, name: str) -> Any:
        if self._fitted is not None and name in AFTERWARDS:
            return getattr(self._fitted, name)
        if name in LIGHTNING_METHODS:
            raise UsageError(f"Trainer.{name} is not possible in a run; {LIGHTNING_METHODS[name]}")
        raise AttributeError(f"the Trainer of undula.adapters.lightning has no attribute {name!r}")

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: object = None,
    ) -> None:
        """Train a module as Lightning's Trainer does. In the driver, give the settings to the job instead.

        Raises:
            UsageError: A run does not support something in the module, its data or its callbacks.
        """
        if ckpt_path is not None:
            raise UsageError(f"Trainer.fit() does not take ckpt_path=; {LIGHTNING_METHODS['ckpt_path']}")
        here = place()
        if here.run is not None:
            given = (model, train_dataloaders, val_dataloaders, datamodule)
            self._fitted = fit(here.run, *given, callbacks=self._callbacks)
            return
        refuse_later(sys._getframe(1), "Trainer", [*dir(self), *AFTERWARDS], LIGHTNING_METHODS)
        loaders = {"train_dataloader": train_dataloaders, "val_dataloader": val_dataloaders}
        goals = goals_of_settings(here.given)
        place_of_hooks = here.virtual_workers, here.rank, here.device
        self._offer(Hooks(model, loaders, datamodule, self._callbacks, *place_of_hooks, goals), here)

    def _offer(self, hooks: Hooks, here: Place) -> NoReturn:
        """End the script in the driver, which then knows what the job needs."""
        settings: dict[str, Setting] = {}
        with ExitStack() as stack:

            def plan_of(data: Data) -> Plan:
                settings.update(data.settings(here.virtual_workers, self._accumulation))
                settings.update(self._stated)
                stack.enter_context(local_world(here.device))  # configure_model may shard the module
                stack.enter_context(torch.device("meta"))  # from here on, the driver needs no memory for weights
                plan = _plan(settings, here.virtual_workers, len(data.training.dataset))
                # What neither the script nor the YAML says is as in Lightning.
                defaults = self._defaults(plan, data.validation is not None)
                settings.update({key: defaults[key] for key in defaults.keys() - here.given - settings.keys()})
                return _plan(settings, here.virtual_workers, len(data.training.dataset))

            hooks.prepare_data()
            data = hooks.set_up(plan_of)
            optimizer, schedulers = hooks.configure_optimizers()
        group = optimizer.param_groups[0]
        rate = float(group.get("initial_lr", group["lr"]))
        settings["schedule.base_lr"] = Setting(rate, "the optimizer of configure_optimizers()")
        if schedulers is None and "schedule.decay" not in here.given:
            settings["schedule.decay"] = Setting("constant", "the script, which has no scheduler,")

        def give(run: Run) -> None:
            data.give(run)
            run.model(hooks.module)

        raise Offer(settings, give)

    def _defaults(self, plan: Plan, validates: bool) -> dict[str, Setting]:
        """Return the number of epochs, the clipping and the interval of validations of Lightning's Trainer."""
        per_epoch = plan.steps_per_epoch
        epochs = math.ceil(plan.spec.max_steps / per_epoch) if plan.spec.max_steps else MOST_EPOCHS
        values: dict[str, Any] = {"plan.epochs": epochs, "gradient.max_norm": None}
        if validates:
            interval, batches = self._val_interval, per_epoch * self._accumulation * (self._val_epochs or 1)
            if isinstance(interval, int):  # a number of batches; other values are a part of an epoch
                batches = interval
            elif interval is not None:
                batches = int(interval * batches)
            values["validation.every_steps"] = max(batches // self._accumulation, 1)
        return {key: Setting(value, "Lightning's Trainer") for key, value in values.items()}


def _plan(settings: Mapping[str, Setting], virtual_workers: int, rows: int) -> Plan:
    spec = {key.removeprefix("plan."): setting.value for key, setting in settings.items() if key.startswith("plan.")}
    return Plan(PlanSpec(virtual_workers=virtual_workers, **spec), rows)
