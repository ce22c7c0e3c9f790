"""Tests of Hugging Face's Trainer with a sharded model: the losses, evaluations and saved models are those of a whole one."""

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_trl
import torch
from adapters_kit import columns, job_of_script, renamed, train_group, train_here
from night import at_night
from ranks import on_ranks
from safetensors.torch import load_file
from tiny_lm import Sequences, tiny_gpt
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, BartConfig, BartForConditionalGeneration
from transformers import Seq2SeqTrainer as TheirSeq2SeqTrainer
from transformers_kit import HAS_STRATEGY, IN_ORDER, Trained, arguments, train_rank

from undula.adapters.script import Script, ScriptConfig
from undula.adapters.transformers import ElasticMixin, Seq2SeqTrainingArguments, Trainer
from undula.errors import SpecError, UsageError
from undula.recovery.worker_state import WorkerState
from undula.testing import conformance

pytestmark = pytest.mark.usefixtures("one_thread")
COLUMNS = ("loss", "grad_norm", "lr", "sample_digest", "weights_digest")
SETTINGS = ("deterministic=true", *IN_ORDER)
GIVEN = {"max_steps": 4, "eval_steps": 2, "save_steps": 2, "optim": "adamw_torch"}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
"""Arguments with which the best model is the first one, because its loss is the highest."""
JOB = """
name: run
plan: {virtual_workers: 4, global_batch: 32, micro_batch: 4, epochs: 4, shuffle: none}
schedule: {base_lr: 0.01}
deterministic: true
"""


def lora(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a frozen model with adapters, which train in float32."""
    peft = pytest.importorskip("peft")
    model = tiny_gpt(dropout=0.1).to(dtype)
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def compare(make: Any, folder: Path, stage: int, world_size: int) -> tuple[Any, list[Any]]:
    """Train a script whole on one rank and sharded on several, and check that their steps are equal.

    Args:
        make: Function that makes the script for the folder of its models.
        folder: Folder of the runs and of the models, which are in `whole` and `sharded`.
        stage: Value of `sharding.stage`.
        world_size: Number of ranks.

    Returns:
        The script that has trained whole, and what the ranks have logged.
    """
    whole, sharded = make(folder / "whole"), make(folder / "sharded")
    expected = train_here(whole, folder, *SETTINGS, virtual_workers=4)
    job = job_of_script(sharded, folder, *SETTINGS, f"sharding.stage={stage}", virtual_workers=4)
    logs = [logs for logs, _ in on_ranks(world_size, train_rank, sharded, renamed(job, "sharded"))]
    assert columns(renamed(job, "sharded"), *COLUMNS) == columns(expected, *COLUMNS)
    return whole, logs


def require_equal_models(folder: Path, count: int) -> None:
    """Check that the files of all saved models are those of the whole model, tensor by tensor."""
    files = sorted(file.relative_to(folder / "whole") for file in (folder / "whole").rglob("*model.safetensors"))
    assert len(files) == count
    for file in files:
        ours, theirs = load_file(folder / "sharded" / file), load_file(folder / "whole" / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), file


@pytest.mark.parametrize(
    ("stage", "world_size", "more"),
    [
        *at_night([(1, 2, {"label_smoothing_factor": 0.1}), (3, 1, {}), (3, 3, {"save_strategy": "best"})]),
        (2, 3, {"neftune_noise_alpha": 5.0}),
        (3, 2, {"gradient_checkpointing": True, "label_smoothing_factor": 0.1}),
    ],
)
def test_a_sharded_model_has_the_bits_of_a_whole_one(
    tmp_path: Path, stage: int, world_size: int, more: dict[str, Any]
) -> None:
    """The best model is loaded at the end, and only process 0 saves it."""

    def make(folder: Path) -> Trained:
        return Trained(Trainer, arguments(folder, **GIVEN, **BEST, **more), partial(tiny_gpt, dropout=0.1), saves=True)

    whole, logs = compare(make, tmp_path, stage, world_size)
    assert logs == [whole.logs] * world_size
    require_equal_models(tmp_path, 2 if more.get("save_strategy") else 3)
    saved = [load_file(tmp_path / "sharded" / name / "model.safetensors") for name in (".", "checkpoint-2")]
    assert torch.equal(saved[0]["transformer.wte.weight"], saved[1]["transformer.wte.weight"])
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded")
    assert type(read).__name__ == "GPT2LMHeadModel"
    assert read.lm_head.weight is read.transformer.wte.weight


@pytest.mark.parametrize("dtype", [*at_night([torch.float32]), torch.bfloat16])
def test_adapters_of_a_frozen_sharded_model_train_and_are_saved_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    def make(folder: Path) -> Trained:
        args = arguments(folder, **GIVEN, **BEST, gradient_checkpointing=True)
        return Trained(Trainer, args, partial(lora, dtype), saves=True)

    whole, logs = compare(make, tmp_path, 3, 2)
    assert logs == [whole.logs] * 2
    require_equal_models(tmp_path, 3)
    assert [file.name for file in (tmp_path / "sharded").glob("*.safetensors")] == ["adapter_model.safetensors"]


class Evaluates(Trained):
    """Script with an optimizer of its own that evaluates before the training, and predicts and saves the model itself afterwards."""

    def __call__(self) -> None:
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizers = (optimizer, LambdaLR(optimizer, lambda step: 1 / (step + 1)))
        trainer = self.kind(model=model, args=self.args, train_dataset=Sequences(100), optimizers=optimizers)
        self.logs = [trainer.evaluate(Sequences(7))["eval_loss"]]
        trainer.train()
        self.process_index = self.args.process_index
        predicted = trainer.predict(Sequences(7, first=500))
        self.logs += [float(predicted.metrics["test_loss"]), predicted.predictions.tolist()]
        trainer.model.save_pretrained(Path(self.args.output_dir) / "own")


def test_a_script_evaluates_predicts_and_saves_around_the_training(tmp_path: Path) -> None:
    def make(folder: Path) -> Trained:
        return Evaluates(Trainer, arguments(folder, **GIVEN, eval_strategy="no"))

    whole, logs = compare(make, tmp_path, 3, 2)
    assert logs == [whole.logs] * 2
    require_equal_models(tmp_path, 3)


class ElasticSeq2SeqTrainer(ElasticMixin, TheirSeq2SeqTrainer):
    """Trainer that can generate in its evaluations."""


class Generates(Trained):
    """Script that generates in its evaluations, for each row until it ends."""

    def __call__(self) -> None:
        trainer = self.kind(
            model=self.model(),
            args=self.args,
            train_dataset=Sequences(100),
            eval_dataset=Sequences(23, first=1000),
            compute_metrics=lambda prediction: {"sum": float(prediction.predictions.clip(0).sum())},
        )
        trainer.train()
        self.process_index = self.args.process_index
        self.logs = [log["eval_sum"] for log in trainer.state.log_history if "eval_sum" in log]


def bart() -> nn.Module:
    torch.manual_seed(0)
    sizes = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64}
    config = BartConfig(vocab_size=50, d_model=16, **sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    return BartForConditionalGeneration(config)


def test_a_sharded_model_generates_in_evaluations_also_before_the_first_step(tmp_path: Path) -> None:
    def make(folder: Path) -> Trained:
        base = arguments(folder, **GIVEN)
        names = (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "max_steps",
            "eval_steps",
            "learning_rate",
        )
        given = {name: getattr(base, name) for name in (*names, "report_to", "use_cpu", "disable_tqdm")}
        if HAS_STRATEGY:
            given["train_sampling_strategy"] = "sequential"
        generates = {
            "predict_with_generate": True,
            "generation_max_length": 8,
            "eval_strategy": "steps",
            "eval_on_start": True,
        }
        args = Seq2SeqTrainingArguments(str(folder), optim="adamw_torch", save_strategy="no", **given, **generates)
        return Generates(ElasticSeq2SeqTrainer, args, bart)

    whole, logs = compare(make, tmp_path, 3, 2)
    assert len(whole.logs) == 3
    assert logs == [whole.logs] * 2


def fine_tunes(kind: str) -> None:
    """Main function of a script that trains 6 steps."""
    folder = Path(tempfile.mkdtemp())
    if kind == "SFT":
        test_trl.Script(kind, folder, is_elastic=True, batch=8, steps=6, logging_steps=100)()  # it counts tokens itself
        return
    args = arguments(folder, **{**GIVEN, "max_steps": 6}, gradient_checkpointing=True)
    Trained(Trainer, args, lora if kind == "LoRA" else partial(tiny_gpt, dropout=0.1))()


KINDS = [(1, "GPT"), (2, "LoRA"), (3, "SFT")]


@pytest.mark.parametrize(("stage", "kind"), [*at_night(KINDS[:1]), *KINDS[1:2]])
def test_a_trainer_with_a_sharded_model_resumes_exactly(tmp_path: Path, stage: int, kind: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    train, sharding = Script(partial(fine_tunes, kind)), f"sharding.stage={stage}"
    conformance.check(train, tmp_path / "job.yaml", sharding, config=ScriptConfig, parts=["resume", "hand over"])


@pytest.mark.parametrize(("stage", "kind"), [*KINDS[1:2], *at_night(KINDS[2:])])
def test_kills_and_changes_of_the_number_of_ranks_change_no_bit(tmp_path: Path, stage: int, kind: str) -> None:
    """The uninterrupted run has one rank."""
    (tmp_path / "job.yaml").write_text(JOB)
    train, sharding = Script(partial(fine_tunes, kind)), f"sharding.stage={stage}"
    conformance.check_on_ranks(train, tmp_path / "job.yaml", sharding, config=ScriptConfig)


def test_an_optimizer_with_other_results_on_shards_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    def refusal(**more: Any) -> str:
        script = Trained(Trainer, arguments(tmp_path / "out", **{**GIVEN, **more}))
        with pytest.raises(SpecError) as caught:
            job_of_script(script, tmp_path, "sharding.stage=3")
        return str(caught.value)

    fused, other = refusal(optim="adamw_torch_fused"), refusal(optim="adafactor")
    assert fused.startswith("sharding.stage cannot be combined with AdamW(fused=True), whose results on shards are")
    assert "; remove fused=True, or set TrainingArguments.optim='adamw_torch' if" in fused
    assert other.startswith("sharding.stage cannot be combined with the optimizer Adafactor, whose results on shards")


def test_a_group_that_ends_after_the_training_hands_its_shards_over(tmp_path: Path) -> None:
    """What a state_dict shows then, from the checkpoint, is for the script alone."""
    script = Trained(Trainer, arguments(tmp_path / "out", **GIVEN))
    job, worker, weights = job_of_script(script, tmp_path, "sharding.stage=3"), WorkerState(), list[Any]()

    def ends() -> None:
        script()
        weights.append(script.weights["transformer.wte.weight"])
        shutil.rmtree(Path(job.run_url) / "checkpoints")
        raise OSError

    train_group(ends, job, worker)
    assert worker.held is not None
    assert not isinstance(weights[0], DTensor)
    train_group(script, job, worker)
    assert torch.equal(script.weights["transformer.wte.weight"], weights[0])


class Changes(Trained):
    """Script that changes weights after the training, and saves them."""

    def __call__(self) -> None:
        trainer = self.kind(model=self.model(), args=self.args, train_dataset=Sequences(100))
        trainer.train()
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(2)
        trainer.save_model()


def test_weights_that_a_script_changes_after_the_training_are_not_saved_as_they_were(tmp_path: Path) -> None:
    script = Changes(Trainer, arguments(tmp_path / "out", **GIVEN, eval_strategy="no"))
    with pytest.raises(UsageError, match=r"^the script has changed weights of the sharded model after train\(\)"):
        train_here(script, tmp_path, "sharding.stage=3")
