"""Rehearsal of a job's steps in a worker that has not joined a group yet, so that torch compiles the model while other workers train.

The script's train function runs up to its steps, on this process alone and on arbitrary samples. It gets a step with one micro-batch of
each size that the plan has, and nothing is committed. torch keeps what it has compiled in this process, and in the cache of the node.
"""

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from undula.data.items import Collate, Items
from undula.data.loader_processes import Loader
from undula.data.maps import SampleFunction
from undula.data.mixture import load_data
from undula.data.nested import with_tensors
from undula.data.script_dataset import IndexedDataset
from undula.parallel.engines.engine import Engine
from undula.parallel.layout import Layout, join_layout
from undula.plan.plan import MicroBatch, Plan
from undula.recovery.worker_state import Kept
from undula.train.job import Job
from undula.train.model import engine_of, place_model
from undula.train.randomness import seed_weights
from undula.train.samples import AnyStream, ScriptSamples, StoredSamples
from undula.train.script_state import AfterStep, Capture, Restore
from undula.train.single_process import local_world
from undula.train.validation import ValidationFunction


def rehearse(train: Callable[[Any], None], job: Job, device: torch.device) -> None:
    """Run a train function up to the end of a step that is not committed. What it prints is not shown.

    If the script fails, the run will report this, so that it does not matter here.
    """
    with local_world(device), redirect_stdout(io.StringIO()):
        run = RehearsedRun(job, join_layout(0, 1, device))
        try:
            train(run)
        except _RehearsedError:
            pass
        except Exception as error:
            logging.getLogger("undula").info("the rehearsal of a step failed: %s", error, exc_info=True)
        finally:
            run.free()


class _RehearsedError(BaseException):
    """Ends the train function after the rehearsal. A script's `except Exception` does not catch it."""


class RehearsedRun:
    """Stand-in for a Run that rehearses a step.

    Its rank is that of a worker that joins another one, so that a script does not write what rank 0 should write.
    """

    def __init__(self, job: Job, layout: Layout):
        self.config, self.base_lr, self.url = job.config, job.schedule.base_lr, job.run_url
        self.rank, self.world_size, self.device = 1, 2, layout.device
        # The reduction of gradients is not compiled, and Horovod needs other ranks.
        self._job = replace(job, engine="torch")
        self._layout = layout
        data = job.script_data.training if job.script_data else load_data(job.data)
        self.plan = Plan(job.plan, data.num_rows)
        self._script_samples: ScriptSamples | None = None
        self._maps: tuple[SampleFunction | None, SampleFunction | None] = (None, None)
        self._engine: Engine | None = None
        self._undo: Callable[[], None] | None = None
        seed_weights(job.plan.seed)

    def model(self, module: nn.Module) -> nn.Module:
        self._engine = engine_of(self._job, module, self._layout)
        self._model, self._undo = place_model(module, self._engine, self._job, self.plan)
        return self._model

    def optimizer(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None
    ) -> torch.optim.Optimizer:
        assert self._engine is not None
        self._engine.prepare(self._model, optimizer)
        return optimizer

    def keep(self, name: str, make: Callable[[], Kept], close: Callable[[Kept], None] | None = None) -> Kept:
        return make()

    def state(self, name: str, capture: Capture, restore: Restore) -> None:
        """Do nothing, because no state is stored or restored."""

    def gather(self, value: object) -> list[Any]:
        return [value]

    def alive(self) -> None:
        """Do nothing, because the rehearsal may take as long as it needs."""

    def restore(self) -> int:
        return 0

    def dataset(
        self,
        dataset: IndexedDataset,
        *,
        validation: IndexedDataset | None = None,
        collate_fn: Collate | None = None,
        **others: object,
    ) -> None:
        assert self._job.script_data is not None
        self._script_samples = ScriptSamples(
            self._job,
            self._job.script_data,
            range(1),
            Items(dataset, collate_fn),
            None if validation is None else Items(validation, collate_fn),
            lambda _: Loader(num_workers=0),
        )

    def map(self, function: SampleFunction, validation: SampleFunction | None = None) -> None:
        self._maps = function, validation or function

    def steps(
        self, validate: ValidationFunction | None = None, after_step: AfterStep | None = None
    ) -> Iterator["RehearsedStep"]:
        """Yield a step, rehearse a validation, and end the train function."""
        assert self._engine is not None
        samples = self._script_samples or StoredSamples(self._job, load_data(self._job.data), range(1), self._maps)
        yield RehearsedStep(self._engine, self.plan, self._batches(samples.training(0), self.plan), self.base_lr)
        if validate is not None and samples.has_validation:
            self._model.eval()
            with torch.no_grad():
                for _, batch in self._batches(samples.validation(), samples.validation_plan):
                    validate(batch)
        raise _RehearsedError

    def free(self) -> None:
        if self._engine:
            self._engine.close()
        if self._undo:
            self._undo()

    def _batches(self, stream: AnyStream, plan: Plan) -> list[tuple[int, Any]]:
        """Return a batch of each size of a plan, with the size. A micro-batch without samples has two rows."""
        found = [(size, stream.any_rows(size or 2).batch) for size in sorted(plan.sizes(), reverse=True)]
        stream.close()
        return [(size, with_tensors(batch, lambda tensor: tensor.to(self.device))) for size, batch in found]


class RehearsedStep:
    """Stand-in for a Step that commits nothing."""

    def __init__(self, engine: Engine, plan: Plan, batches: list[tuple[int, Any]], lr: float):
        self.index, self.samples, self.lr = 0, plan.step(0).samples, lr
        self.applied, self.updated = True, False
        self._engine = engine
        self._batches = batches
        self.micro_batch: MicroBatch | None = None
        self.is_last = False
        self.merged_steps = 1

    def load(self) -> list[Any]:
        return [batch for _, batch in self._batches]

    def total(self, value: float) -> float:
        return value

    def batches(self) -> Iterator[Any]:
        self._engine.begin_step(len(self._batches))
        for place, (size, batch) in enumerate(self._batches):
            self.is_last = place == len(self._batches) - 1
            self._engine.before_forward(self.is_last)
            self.micro_batch = MicroBatch(0, 0, place, size)
            yield batch

    def backward(self, loss: Tensor, share: float | None = None) -> None:
        assert self.micro_batch is not None
        self._engine.backward(loss, 1.0, self.micro_batch, self.is_last)

    def log(self, **values: float | Tensor) -> None:
        """Do nothing, because the step is not recorded."""

    def reduce(self, max_norm: float | None = None) -> Tensor:
        return torch.zeros(())

    def update(self) -> None:
        self._engine.free_gradients()
        self.updated = True
