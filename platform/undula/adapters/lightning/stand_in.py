"""Stand-in for Lightning's Trainer, as a module and its callbacks see it while a run trains the module."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from undula.errors import UsageError
from undula.plan.plan import Plan
from undula.train.metrics import is_metric
from undula.train.step import Step


class MissingError(UsageError, AttributeError):
    """An attribute of Lightning's Trainer that a run does not have. It is an AttributeError too, so that `hasattr` and `getattr` work."""


class Recorder:
    """Receives what `self.log` records: values of a micro-batch in training, and means of a batch in validation.

    Lightning's own `log` checks its arguments and calls this.

    Args:
        size_of: Function that returns the number of samples of a batch.
    """

    def __init__(self, size_of: Callable[[Any], int]) -> None:
        self._size_of = size_of
        self.batch: Any = None
        """Current batch."""
        self.step: Step | None = None
        """Step that takes the values; None if there is none, or if it is committed."""
        self.means: dict[str, Any] | None = None
        """Means and metrics of the current batch of a validation; None outside of one."""

    def log(
        self,
        hook: str,
        name: str,
        value: Any,
        *,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        **display: Any,
    ) -> None:
        """Record a value. The arguments that decide where and how often Lightning shows it have no effect."""
        if is_metric(value) and self.means is not None:
            self.means[name] = value
            return
        if not isinstance(value, Tensor):
            raise UsageError(
                f"self.log({name!r}) got a {type(value).__name__}, which a run takes in validation_step only; log what it returns for the "
                "batch, such as self.log('acc', self.acc(predicted, labels))"
            )
        if reduce_fx not in ("mean", torch.mean):
            raise UsageError(
                f"self.log({name!r}) got reduce_fx={reduce_fx!r}, but a run takes the mean over samples; log what can be averaged"
            )
        size = self._size() if batch_size is not None else None
        if size is not None and batch_size != size:
            raise UsageError(
                f"self.log({name!r}) got batch_size={batch_size} for {size} samples, but a run takes the mean over samples; log the mean "
                "over the samples of the batch, without batch_size"
            )
        if self.means is not None:
            self.means[name] = value
        elif self.step is not None:
            self.step.log(**{name: value})
        else:
            raise UsageError(
                f"self.log({name!r}) was called in {hook}(), which belongs to no batch; log it in training_step or validation_step, of "
                "which a run takes the mean over samples, or a metric of torchmetrics itself in validation_step"
            )

    def _size(self) -> int | None:
        """Return the number of samples of the current batch; None if there is none, or if Lightning cannot tell."""
        if self.means is None and self.step is None:
            return None
        try:
            return self._size_of(self.batch)
        except Exception:  # of a library's own class
            return None

    def reset(self, **_: Any) -> None:
        """Do nothing, because a step and a batch begin without values."""


class FitTrainer:
    """What a module finds as `self.trainer`.

    Args:
        module: The module that the run trains.
        datamodule: Its data; None if the script has no LightningDataModule.
        callbacks: Callbacks of the script.
        virtual_workers: Number of virtual workers of the plan.
        rank: Rank of this process.
        device: Device of this process.
        size_of: Function that returns the number of samples of a batch.
    """

    plan: Plan
    """The plan, as soon as the data are known."""

    def __init__(
        self,
        module: Any,
        datamodule: Any,
        callbacks: list[Any],
        virtual_workers: int,
        rank: int,
        device: torch.device,
        size_of: Callable[[Any], int],
    ):
        self.lightning_module = self.model = module
        self.datamodule = datamodule
        self.callbacks = callbacks
        self.global_step = self.current_epoch = 0
        self.should_stop = self.sanity_checking = self.validating = False
        self.training = True
        self.testing = self.predicting = self.evaluating = self.barebones = self.fast_dev_run = False
        self.logger = self.progress_bar_callback = None
        self.loggers: list[Any] = []
        self.callback_metrics: dict[str, Tensor] = {}
        """Means of the newest validation."""
        self.global_rank, self.is_global_zero = rank, rank == 0
        self.world_size = virtual_workers
        """Number of virtual workers, because what depends on it must not change when the number of ranks does."""
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.state = SimpleNamespace(fn="fit")
        self.strategy = _Strategy(device)
        self.recorder = self._results = Recorder(size_of)
        self._logger_connector = SimpleNamespace(_current_fx=None, should_reset_tensors=lambda hook: False)
        self._accelerator_connector = SimpleNamespace(is_distributed=False)

    def __getattr__(self, name: str) -> NoReturn:
        raise MissingError(
            f"self.trainer.{name} was read, but Undula runs the module without Lightning's Trainer and has no value for it; use self.log, "
            "self.device, or what docs/lightning.md lists"
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leave this object out of a module that is sent to a loader process, for example with a collate function that is its method."""
        return type(None), ()

    @property
    def max_epochs(self) -> int:
        return self.plan.spec.epochs

    @property
    def max_steps(self) -> int:
        return self.plan.spec.max_steps or -1

    @property
    def estimated_stepping_batches(self) -> int:
        return self.plan.total_steps

    @property
    def accumulate_grad_batches(self) -> int:
        """Number of micro-batches of a virtual worker in a full step."""
        return len(self.plan.micro_batches(0, 0))

    @property
    def num_training_batches(self) -> int:
        """Number of micro-batches of the first virtual worker in an epoch."""
        plan = self.plan
        last = plan.steps_per_epoch - 1
        return last * self.accumulate_grad_batches + len(plan.micro_batches(last, 0))


class _Strategy:
    """What Lightning's `log` and `optimizers` read of a strategy."""

    def __init__(self, device: torch.device):
        self.root_device = device
        self._lightning_optimizers: list[Any] = []

    def __getattr__(self, name: str) -> NoReturn:
        raise MissingError(
            f"self.trainer.strategy.{name} was read, but a run has no strategy of Lightning: ranks come and go between steps; remove it"
        )

    def all_gather(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse what the module's own `all_gather` calls."""
        raise UsageError(
            "self.all_gather() was called, but the number of workers decides which batches each has; compute a loss from its batch alone, "
            "and give self.log what it shall average over all samples, or a metric of torchmetrics in validation_step"
        )

    def reduce(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a reduction; `log` takes this function but does not call it."""
        raise UsageError(
            "self.trainer.strategy.reduce() was called, but a run reduces what self.log records; call self.log"
        )
