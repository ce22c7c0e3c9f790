"""Tests of Hugging Face's Trainer under the loop of a run: equal to their own loop, at any world size, and after any interruption."""

import atexit
import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from adapters_kit import columns, job_of_script, renamed, train_group, train_here
from peft import LoraConfig, get_peft_model
from ranks import on_ranks
from tiny_lm import Sequences, tiny_gpt
from torch import nn
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, EarlyStoppingCallback
from transformers.trainer_utils import get_last_checkpoint
from transformers_kit import HAS_STRATEGY, IN_ORDER, Ends, Theirs, Trained, accuracy, arguments, train_rank

from undula.adapters import script
from undula.adapters.transformers import ElasticMixin, Trainer
from undula.errors import SpecError, UndulaError, UsageError
from undula.recovery.worker_state import WorkerState
from undula.state.events import EndEvent, LogEvent, ValidationEvent
from undula.state.ledger import events_of, last_event, read_ledger
from undula.storage import open_store
from undula.train.single_process import local_world

pytestmark = pytest.mark.usefixtures("one_thread")


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


class TheirWeighted(Theirs):
    loss_is_scaled_for_ga = False
    compute_loss = Weighted.compute_loss

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        if not hasattr(transformers.Trainer, "loss_is_scaled_for_ga"):
            self.model_accepts_loss_kwargs = False  # which these versions look at instead


def lora() -> nn.Module:
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_dropout=0.0, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    return get_peft_model(tiny_gpt(), config)  # type: ignore[no-any-return]


PLAIN = (Theirs, Trainer)
BEST = {"max_steps": 6, "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
"""Arguments with which the first model counts as the best."""
EPOCHS = {"max_steps": -1, "num_train_epochs": 2.5, "eval_strategy": "epoch", "logging_steps": 3, "eval_on_start": True}


@pytest.mark.parametrize(
    ("kinds", "model", "more"),
    [
        (PLAIN, tiny_gpt, {}),
        (PLAIN, lora, {}),
        (PLAIN, tiny_gpt, {"label_smoothing_factor": 0.1}),
        ((TheirWeighted, Weighted), tiny_gpt, {}),
        (PLAIN, tiny_gpt, EPOCHS),
        (PLAIN, tiny_gpt, BEST),
        (PLAIN, lora, BEST),
    ],
    ids=["plain", "lora", "label smoothing", "own loss", "epochs", "best", "best lora"],
)
def test_the_run_is_that_of_their_own_loop(
    tmp_path: Path, kinds: tuple[type, type], model: Callable[[], nn.Module], more: dict[str, Any]
) -> None:
    theirs = Trained(kinds[0], arguments(tmp_path / "theirs", **more), model)
    theirs()
    ours = Trained(kinds[1], arguments(tmp_path / "ours", **more), model)
    train_here(ours, tmp_path, *IN_ORDER)
    assert ours.watch.calls == theirs.watch.calls
    assert len(ours.logs) == len(theirs.logs)
    for our, their in zip(ours.logs, theirs.logs, strict=True):
        norms = [log.pop("grad_norm", None) for log in (our, their)]
        assert norms[0] == (
            norms[1] and pytest.approx(norms[1], rel=1e-4)
        )  # they clip by a norm that torch rounds otherwise
        assert our == pytest.approx(their, abs=1e-5)
    for name, value in theirs.weights.items():
        torch.testing.assert_close(_compared(name, ours.weights[name]), _compared(name, value), rtol=0, atol=2e-5)


def _compared(name: str, value: torch.Tensor) -> torch.Tensor:
    """Leave out the biases of keys. Their gradient is zero but for rounding, which Adam makes as large as any other gradient."""
    if not name.endswith("attn.c_attn.bias"):
        return value
    queries, _, values = value.chunk(3)
    return torch.cat([queries, values])


def test_what_was_saved_is_loaded_by_from_pretrained(tmp_path: Path) -> None:
    script = Trained(Trainer, arguments(Path("models"), max_steps=5, save_steps=5))
    job = train_here(script, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(f"{job.run_url}/models/checkpoint-5")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, script.weights[name])


def test_the_world_size_changes_no_bit(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", per_device_train_batch_size=3, max_steps=12, eval_steps=4, logging_steps=2)
    script = Trained(Trainer, args, partial(tiny_gpt, dropout=0.1), saves=True)
    job = renamed(job_of_script(script, tmp_path, "deterministic=true", virtual_workers=4), "two")
    assert (job.plan.global_batch, job.plan.micro_batch, job.plan.max_steps) == (24, 3, 12)
    names = ("loss", "grad_norm", "lr", "sample_digest", "weights_digest")
    alone = train_here(script, tmp_path, "deterministic=true", virtual_workers=4)
    results = on_ranks(2, train_rank, script, job)
    assert results == [(script.logs, 0), (script.logs, 1)]
    assert columns(job, *names) == columns(alone, *names)
    assert {"eval_loss", "eval_accuracy", "eval_rows"} <= script.logs[2].keys()


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


class Logging(Trainer):
    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        super().log({**logs, "entropy": 0.5, "train_kl": np.float32(0.25), "eval_seen": torch.tensor(2)}, *arguments)


def test_numbers_of_the_script_and_of_several_evaluation_datasets_are_in_the_ledger(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", max_steps=4, logging_steps=2, eval_steps=4, save_strategy="no")
    far = {"near": Sequences(5, first=1000), "far": Sequences(6, first=5000)}

    def main() -> None:
        Logging(tiny_gpt(), args, train_dataset=Sequences(100), eval_dataset=far, compute_metrics=accuracy).train()

    job = train_here(main, tmp_path)
    logged = events_of(read_ledger(open_store(job.run_url)).events, LogEvent)
    names = {"near_loss", "near_accuracy", "near_rows", "far_loss", "far_accuracy", "far_rows"}
    assert [(event.step, {*event.values}) for event in logged if "near_loss" in event.values] == [(4, names)]
    assert [event.step for event in logged if "near_loss" not in event.values] == [2, 4, 4, 4, 4]
    own = [{"entropy": 0.5, "train_kl": 0.25, "eval_seen": 2.0}, {"entropy": 0.5, "train_kl": 0.25}]
    assert all(event.values in own for event in logged if "near_loss" not in event.values)


class ZeroesBefore(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.optimizer.zero_grad()
        self.model.zero_grad()
        return super().training_step(model, inputs, num_items_in_batch)


class ZeroesAfter(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.optimizer.zero_grad()
        return loss


class Clips(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss


class GathersInSteps(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **more: Any) -> Any:
        loss = super().compute_loss(model, inputs, *arguments, **more)
        value = loss[0] if isinstance(loss, tuple) else loss
        with torch.no_grad():
            assert str((self.accelerator.gather(value).mean() + value).item()) == str(2 * float(value))
        gathered = self.accelerator.gather_for_metrics(value)
        assert str(gathered.repeat(2).tolist()) == str([float(value)] * 2)
        assert f"{gathered.mean():.3f}" == f"{value.mean():.3f}"
        assert type(copy.deepcopy(gathered)) is type(pickle.loads(pickle.dumps(gathered))) is torch.Tensor
        return loss


class GathersForTheLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **more: Any) -> Any:
        return self.accelerator.gather(super().compute_loss(model, inputs, *arguments, **more))


class GathersNegatives(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **more: Any) -> Any:
        loss = super().compute_loss(model, inputs, *arguments, **more)
        return loss - 0.1 * self.accelerator.gather(loss.detach())


class GathersBetweenSteps(Trainer):
    def log(self, *arguments: Any, **more: Any) -> None:
        self.accelerator.gather(torch.tensor(1.0))


class BackwardOfEach(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        first, second = model(**inputs).loss, model(**inputs).logits.square().mean()
        self.accelerator.backward(first, retain_graph=True)
        self.accelerator.backward(second)
        return first + second


class BackwardToInputs(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = model(**inputs).loss
        self.accelerator.backward(loss, inputs=list(model.parameters())[:1])
        return loss


class AddsLoss(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model(**inputs).loss.backward()
        return super().training_step(model, inputs, num_items_in_batch)


def losses(kind: type[Any], folder: Path) -> list[float]:
    folder.mkdir()
    args = arguments(folder / "out", max_steps=4, eval_steps=1, save_strategy="no")
    return columns(train_here(Trained(kind, args), folder, virtual_workers=4), "loss")[0]


def test_zero_grad_before_the_backward_pass_deletes_no_gradient_of_a_step(tmp_path: Path) -> None:
    assert losses(ZeroesBefore, tmp_path / "zeroes") == losses(Trainer, tmp_path / "plain")


def test_what_a_step_gathers_for_metrics_is_that_of_its_own_batch(tmp_path: Path) -> None:
    assert losses(GathersInSteps, tmp_path / "gathers") == losses(Trainer, tmp_path / "plain")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (ZeroesAfter, "zero_grad() was called after step.backward() in step 0"),
        (Clips, "clip_grad_norm_() changed a gradient of an open step"),
        (AddsLoss, "loss.backward() was called in step 0"),
        (
            BackwardOfEach,
            "step.backward(loss), or backward() of an adapter, was called twice for a batch of step 0; add up",
        ),
        (BackwardToInputs, "accelerator.backward() does not take inputs="),
        (GathersForTheLoss, "what accelerator.gather() returned in a training step is used for the loss"),
        (GathersNegatives, "what accelerator.gather() returned in a training step is used for the loss"),
        (GathersBetweenSteps, "accelerator.gather() was called outside of a step and of an evaluation"),
    ],
)
def test_a_trainer_that_does_in_a_step_what_a_run_does_is_refused(
    tmp_path: Path, kind: type[Any], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        losses(kind, tmp_path / "run")
    assert str(caught.value).startswith(sentence)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from Sequences(4)


def not_supported(argument: str, value: str) -> str:
    return f"TrainingArguments.{argument} is {value}, which a run does not support; "


BY_LENGTH = (
    (Sequences(9), {"train_sampling_strategy": "batch_rebalance"}, not_supported("train_sampling_strategy", "'batch_rebalance'"))
    if HAS_STRATEGY
    else (Sequences(9), {"group_by_length": True}, not_supported("group_by_length", "True"))
)  # fmt: skip


@pytest.mark.parametrize(
    ("dataset", "more", "sentence"),
    [
        (Endless(), {}, "train_dataset= of the Trainer is an IterableDataset"),
        (Endless(), {"max_steps": -1}, "train_dataset= of the Trainer is an IterableDataset"),
        ({"train": Sequences(9)}, {}, "train_dataset= of the Trainer is a mapping with the keys 'train'; pass one of"),
        (Sequences(3), {"per_device_train_batch_size": 8, "dataloader_drop_last": True}, "a step takes 16 samples"),
        (Sequences(9), {"fsdp": True}, "TrainingArguments.fsdp is "),
        BY_LENGTH,
        (Sequences(9), {"optim": "adalomo"}, not_supported("optim", "'adalomo'") + "use an optimizer that does"),
        (Sequences(9), {"optim": "schedule_free_adamw"}, not_supported("optim", "'schedule_free_adamw'") + "use another"),
        (Sequences(9), {"data_seed": 3}, "TrainingArguments.data_seed is 3 and seed is 42, but a run has one seed"),
        (Sequences(9), {"auto_find_batch_size": True}, not_supported("auto_find_batch_size", "True") + "set per_device"),
        (Sequences(9), {"hub_token": "hf_" + "A" * 34}, not_supported("hub_token", "(hidden)") + "push"),
    ],
)  # fmt: skip
def test_what_a_run_cannot_honour_is_refused_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: Any, more: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")  # older versions of transformers set it for all that follows

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
    sentence = r"makes it 50; remove plan.max_steps, and set TrainingArguments.max_steps \(--max_steps\) in its place$"
    with pytest.raises(SpecError, match=sentence):
        job_of_script(script, tmp_path, "plan.max_steps=7")
    assert job_of_script(script, tmp_path, "plan.seed=42").plan.seed == 42


def test_a_trainer_outside_of_a_run_says_how_to_launch_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        Trainer(model=tiny_gpt(), args=arguments(tmp_path, eval_strategy="no"))
    assert caught.value.code == UsageError.status
    assert capsys.readouterr().err == (
        "undula: the script trains without a run; end it with launch(main) in place of main(), and start it with `undula run JOB.yaml`\n"
    )


def test_a_trainer_in_the_train_function_of_another_script_is_an_error_of_the_run(tmp_path: Path) -> None:
    with local_world(torch.device("cpu")), pytest.raises(UsageError, match=r"end it with launch\(main\)"):
        Trainer(model=tiny_gpt(), args=arguments(tmp_path, eval_strategy="no"))


def test_a_started_script_that_does_not_launch_ends_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("undula.driver.script._has_begun", False)
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    script.expect_launch()
    assert not registered
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--config", "finetune.yaml"])
    script.expect_launch()
    registered[0]()
    assert capsys.readouterr().err == (
        "undula: the script ended before it called launch(main); if it calls main() at its end, call launch(main) in its place\n"
    )


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


def test_a_second_training_of_a_script_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", max_steps=1, eval_strategy="no", save_strategy="no")

    def main() -> None:
        for _ in range(2):
            Trainer(tiny_gpt(), args, train_dataset=Sequences(20)).train()

    with pytest.raises(UsageError, match=r"what a second train\(\) or fit\(\) of a script does is another job"):
        train_here(main, tmp_path, *IN_ORDER)


def test_a_script_that_looks_for_the_last_checkpoint_of_its_run_continues(tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", max_steps=6, save_steps=2, eval_strategy="no")
    worker = WorkerState(is_run=True, controller=object())
    found = []

    class Looks(Trained):
        def __call__(self) -> None:
            trainer = Trainer(tiny_gpt(), args, train_dataset=Sequences(100), callbacks=[Ends(worker, None, leaves_at)])
            found.append(get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None)
            trainer.train(resume_from_checkpoint=found[-1])
            self.step = trainer.state.global_step

    script, leaves_at = Looks(Trainer, args), 3
    job = job_of_script(script, tmp_path, *IN_ORDER)
    train_group(script, job, worker)
    leaves_at = None
    assert job_of_script(script, tmp_path, *IN_ORDER).plan == job.plan  # the driver of a second submission
    train_group(script, job, worker)
    assert found == [None, None, *[str(tmp_path / "out" / "checkpoint-4")] * 2]
    assert script.step == 6
    with pytest.raises(UsageError, match="which is of another training, because this run has not begun"):
        train_here(script, tmp_path, "name=other", *IN_ORDER)
