"""Scripts with Hugging Face's Trainer, and groups of workers that end while they train."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from adapters_kit import train_group
from numbers_job import cpu_run
from tiny_lm import Sequences, tiny_gpt
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from undula.adapters.script import Script
from undula.recovery.worker_state import Request, WorkerState
from undula.train.job import Job

Calls = list[tuple[str, int, float | None]]
STEPS = 50
HAS_STRATEGY = "train_sampling_strategy" in {field.name for field in fields(TrainingArguments)}
"""Whether a script can ask for the order of the dataset; otherwise the YAML does it."""
IN_ORDER = () if HAS_STRATEGY else ("plan.shuffle=none",)
EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class Watch(TrainerCallback):  # type: ignore[misc]
    """Callback that records its calls."""

    def __init__(self) -> None:
        self.calls: Calls = []


def _recorded(name: str) -> Callable[..., Any]:
    def record(self: Watch, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.calls.append((name, state.global_step, state.epoch))
        return control

    return record


for _name in EVENTS:
    setattr(Watch, _name, _recorded(_name))


class Theirs(Trainer):  # type: ignore[misc]
    """Hugging Face's Trainer, which takes the samples in the order of the dataset."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 5,
        **({"train_sampling_strategy": "sequential"} if HAS_STRATEGY else {}),
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 20,
        "save_steps": 25,
        "per_device_eval_batch_size": 5,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**{**given, **more})


def accuracy(prediction: Any) -> dict[str, float]:
    right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "rows": len(prediction.label_ids)}


class Trained:
    """Script that trains, and what it leaves: calls of callbacks, logs and weights.

    Its arguments are made outside of it, so that ranks get them pickled. With `saves`, only process 0 saves the model at the end.
    """

    def __init__(self, kind: type, args: TrainingArguments, model: Callable[[], nn.Module] = tiny_gpt, **more: Any):
        self.kind, self.args, self.model, self.more = kind, args, model, more
        self.watch = Watch()

    def __call__(self) -> None:
        self.watch = Watch()
        trainer = self.kind(
            model=self.model(),
            args=self.args,
            train_dataset=Sequences(100),
            eval_dataset=Sequences(23, first=1000),
            compute_metrics=accuracy,
            callbacks=[self.watch, *self.more.get("callbacks", [])],
        )
        trainer.train()
        if self.more.get("saves") and trainer.is_world_process_zero():
            trainer.save_model()
        self.process_index = self.args.process_index
        self.logs = [_without_times(each) for each in trainer.state.log_history]
        self.weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}


def _without_times(log: dict[str, float]) -> dict[str, float]:
    times = ("_runtime", "_per_second", "_preparation_time", "_flos")
    return {name: value for name, value in log.items() if not name.endswith(times)}


def train_rank(rank: int, world_size: int, script: Any, job: Job) -> Any:
    run = cpu_run(job, rank, world_size)
    Script(script)(run)
    run.free()
    return script.logs, script.process_index


class Ends(TrainerCallback):  # type: ignore[misc]
    """Callback that ends the group at some moments: by an error in an evaluation, or by a request to leave."""

    def __init__(self, worker: WorkerState, fails_at: int | None, leaves_at: int | None):
        self._worker, self._fails_at, self._leaves_at = worker, fails_at, leaves_at

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._worker.request = Request(leaves=state.global_step == self._leaves_at)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._fails_at:
            raise OSError


def train_in_groups(
    job: Job, make: Callable[[TrainerCallback], Trained], *ends: tuple[int | None, int | None]
) -> Trained:
    """Train in groups of one rank that follow each other, and return the script of the last one, which goes on to the end.

    Args:
        job: The job.
        make: Function that returns the script with a callback that ends the group.
        ends: Steps of each group but the last in whose evaluation it fails, or before which it leaves.
    """
    worker = WorkerState(is_run=True, controller=object())
    for fails_at, leaves_at in (*ends, (None, None)):
        script = make(Ends(worker, fails_at, leaves_at))
        train_group(script, job, worker)
    return script
