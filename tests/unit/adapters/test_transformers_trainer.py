"""Tests of Hugging Face's Trainer under the loop of a run: equal to their own loop, at any world size, and after any interruption."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapters_kit import columns, job_of_script, renamed, train_here
from numbers_job import cpu_run
from peft import LoraConfig, get_peft_model
from ranks import on_ranks
from tiny_lm import Sequences, tiny_gpt
from torch import nn
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback, TrainingArguments

from undula.adapters.script import Script
from undula.adapters.transformers import ElasticMixin, Trainer
from undula.errors import SpecError, UndulaError, UsageError
from undula.recovery.worker_state import LeaveGroup, Request, WorkerState
from undula.state.events import EndEvent, ValidationEvent
from undula.state.ledger import events_of, last_event, read_ledger
from undula.storage import open_store
from undula.train.job import Job
from undula.train.single_process import local_world

Calls = list[tuple[str, int, float | None]]
STEPS = 50
EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: several are slow for tensors as small as these, above all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


class Weighted(ElasticMixin, transformers.Trainer):  # type: ignore[misc]
    """Trainer with a loss of its own, a mean over the samples of a micro-batch."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits[:, -2], labels[:, -1])
        return (loss, outputs) if return_outputs else loss


class TheirWeighted(transformers.Trainer):  # type: ignore[misc]
    loss_is_scaled_for_ga = False
    compute_loss = Weighted.compute_loss


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 5,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 20,
        "save_steps": 25,
        "per_device_eval_batch_size": 5,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**{**given, **more})


def accuracy(prediction: Any) -> dict[str, float]:
    right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "rows": len(prediction.label_ids)}


class Trained:
    """Script that trains, and what it leaves: calls of callbacks, logs and weights."""

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
        self.logs = [_without_times(each) for each in trainer.state.log_history]
        self.weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}


def _without_times(log: dict[str, float]) -> dict[str, float]:
    times = ("_runtime", "_per_second", "_preparation_time", "_flos")
    return {name: value for name, value in log.items() if not name.endswith(times)}


def lora() -> nn.Module:
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_dropout=0.0, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    return get_peft_model(tiny_gpt(), config)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kinds", "model", "more"),
    [
        ((transformers.Trainer, Trainer), tiny_gpt, {}),
        ((transformers.Trainer, Trainer), lora, {}),
        ((transformers.Trainer, Trainer), tiny_gpt, {"label_smoothing_factor": 0.1}),
        ((TheirWeighted, Weighted), tiny_gpt, {}),
        (
            (transformers.Trainer, Trainer),
            tiny_gpt,
            {
                "max_steps": -1,
                "num_train_epochs": 2.5,
                "eval_strategy": "epoch",
                "logging_steps": 3,
                "eval_on_start": True,
            },
        ),
    ],
    ids=["plain", "lora", "label smoothing", "own loss", "epochs"],
)
def test_the_run_is_that_of_their_own_loop(
    tmp_path: Path, kinds: tuple[type, type], model: Callable[[], nn.Module], more: dict[str, Any]
) -> None:
    theirs = Trained(kinds[0], arguments(tmp_path / "theirs", **more), model)
    theirs()
    ours = Trained(kinds[1], arguments(tmp_path / "ours", **more), model)
    train_here(ours, tmp_path)
    assert ours.watch.calls == theirs.watch.calls
    assert len(ours.logs) == len(theirs.logs)
    for our, their in zip(ours.logs, theirs.logs, strict=True):
        assert our == pytest.approx(their, abs=1e-6)
    for name, value in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], value, rtol=0, atol=1e-6)


def test_what_was_saved_is_loaded_by_from_pretrained(tmp_path: Path) -> None:
    script = Trained(Trainer, arguments(Path("models"), max_steps=5, save_steps=5))
    job = train_here(script, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(f"{job.run_url}/models/checkpoint-5")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, script.weights[name])


def train_rank(rank: int, world_size: int, script: Any, job: Job) -> Any:
    run = cpu_run(job, rank, world_size)
    Script(script)(run)
    run.free()
    return script.logs


def test_the_world_size_changes_no_bit(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", per_device_train_batch_size=3, max_steps=12, eval_steps=4, logging_steps=2)
    script = Trained(Trainer, args, partial(tiny_gpt, dropout=0.1))
    job = renamed(job_of_script(script, tmp_path, "deterministic=true", virtual_workers=4), "two")
    assert (job.plan.global_batch, job.plan.micro_batch, job.plan.max_steps) == (24, 3, 12)
    names = ("loss", "grad_norm", "lr", "sample_digest", "weights_digest")
    alone = train_here(script, tmp_path, "deterministic=true", virtual_workers=4)
    results = on_ranks(2, train_rank, script, job)
    assert results == [script.logs, script.logs]
    assert columns(job, *names) == columns(alone, *names)
    assert {"eval_loss", "eval_accuracy", "eval_rows"} <= script.logs[2].keys()


class Ends(TrainerCallback):  # type: ignore[misc]
    """Callback that ends the group at some moments: by an error in an evaluation, or by a request to leave."""

    def __init__(self, worker: WorkerState, fails_at: int | None, leaves_at: int | None):
        self._worker, self._fails_at, self._leaves_at = worker, fails_at, leaves_at

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._worker.request = Request(leaves=state.global_step == self._leaves_at)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._fails_at:
            raise OSError


def test_a_group_may_end_in_an_evaluation_or_at_a_boundary(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", max_steps=14, eval_steps=4, save_strategy="no", logging_steps=3)
    undisturbed = Trained(Trainer, args, partial(tiny_gpt, dropout=0.1))
    expected = train_here(undisturbed, tmp_path, "deterministic=true")
    job, worker = renamed(expected, "disturbed"), WorkerState(is_run=True, controller=object())
    for fails_at, leaves_at in ((4, None), (None, 9), (None, None)):
        script = Trained(Trainer, args, undisturbed.model, callbacks=[Ends(worker, fails_at, leaves_at)])
        with local_world(torch.device("cpu")):
            worker.join_group()
            run = cpu_run(job, worker=worker)
            try:
                Script(script)(run)
            except (OSError, LeaveGroup):
                run.hand_over()
            run.free()
    names = ("step", "loss", "grad_norm", "lr", "weights_digest")
    assert columns(job, *names) == columns(expected, *names)
    assert script.logs[:-1] == undisturbed.logs[:-1]  # the last one has the mean over this process's steps


def test_evaluations_are_results_of_the_run_and_a_callback_can_stop_it(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", learning_rate=1e-12, eval_steps=2, save_steps=2, metric_for_best_model="loss")
    script = Trained(Trainer, args, callbacks=[EarlyStoppingCallback(2, early_stopping_threshold=1.0)])
    job = train_here(script, tmp_path)
    ledger = read_ledger(open_store(job.run_url))
    found = events_of(ledger.events, ValidationEvent)
    assert [event.step for event in found] == [2, 4, 6]
    assert found[0].samples == 23
    assert found[0].means.keys() == {"loss", "accuracy", "rows"}
    end = last_event(ledger.events, EndEvent)
    assert end is not None
    assert (end.step, end.reason) == (6, "a callback of the script stopped the training")


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from Sequences(4)


@pytest.mark.parametrize(
    ("dataset", "more", "sentence"),
    [
        (Endless(), {}, "run.dataset() got an IterableDataset"),
        (Sequences(3), {"per_device_train_batch_size": 8, "dataloader_drop_last": True}, "a step takes 16 samples"),
        (Sequences(9), {"fsdp": True}, "TrainingArguments.fsdp is True, which a run does not support; shard"),
        (
            Sequences(9),
            {"train_sampling_strategy": "group_by_length"},
            "TrainingArguments.train_sampling_strategy is 'group_by_length', which a run does not support; set",
        ),
        (
            Sequences(9),
            {"optim": "adalomo"},
            "TrainingArguments.optim is 'adalomo', which a run does not support; use an",
        ),
        (Sequences(9), {"data_seed": 3}, "TrainingArguments.data_seed is 3 and seed is 42, but a run has one seed"),
        (Sequences(9), {"auto_find_batch_size": True}, "TrainingArguments.auto_find_batch_size is True, which a run"),
    ],
)
def test_what_a_run_cannot_honour_is_refused_before_a_worker_starts(
    tmp_path: Path, dataset: Any, more: dict[str, Any], sentence: str
) -> None:
    def main() -> None:
        args = arguments(tmp_path / "out", **{"eval_strategy": "no", **more})
        Trainer(model=tiny_gpt(), args=args, train_dataset=dataset).train()

    with pytest.raises(UndulaError) as caught:
        job_of_script(main, tmp_path)
    assert str(caught.value).startswith(sentence)


def test_a_value_of_the_yaml_that_the_arguments_contradict_is_refused(tmp_path: Path) -> None:
    script = Trained(Trainer, arguments(tmp_path / "out"))
    with pytest.raises(
        SpecError, match=r"command line: plan\.seed is 7, but TrainingArguments.seed makes it 42; remove"
    ):
        job_of_script(script, tmp_path, "plan.seed=7")
    assert job_of_script(script, tmp_path, "plan.seed=42").plan.seed == 42


def test_a_trainer_outside_of_a_run_says_how_to_launch_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"end it with launch\(main\) in place of main\(\)"):
        Trainer(model=tiny_gpt(), args=arguments(tmp_path))


def test_a_missing_library_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('no', name='transformers')")
    done = subprocess.run(
        [sys.executable, "-c", "import undula.adapters.transformers"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == SpecError.status
    assert done.stderr == "undula: transformers is not installed; run pip install 'undula[transformers]'\n"
