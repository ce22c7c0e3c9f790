"""Trainers of TRL, which gather metrics in their steps, under the loop of a run: their own losses, at any number of ranks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters_kit import columns, job_of_script, renamed, train_here
from datasets import Dataset
from night import at_night
from ranks import on_ranks
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers_kit import HAS_STRATEGY, IN_ORDER, train_rank

from undula.adapters.transformers import ElasticMixin, PlannedArguments
from undula.errors import UsageError

trl = pytest.importorskip("trl")
WORDS = [f"w{number}" for number in range(40)]


def text(number: int, length: int = 6) -> str:
    return " ".join(WORDS[(number * 7 + place * (1 + number % 3)) % len(WORDS)] for place in range(length))


def tokenizer() -> PreTrainedTokenizerFast:
    ids = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>", unk_token="<unk>"
    )


def rows(kind: str) -> Dataset:
    numbers = range(48)
    if kind == "SFT":
        return Dataset.from_list([{"text": text(number, 4 + number % 5)} for number in numbers])
    pairs = [{"chosen": " " + text(number), "rejected": " " + text(number + 5)} for number in numbers]
    return Dataset.from_list([{"prompt": text(n + 9), **pair} for n, pair in enumerate(pairs)])


class Script:
    """Script that trains a small model with a trainer of TRL, an elastic one or its own."""

    def __init__(self, kind: str, folder: Path, is_elastic: bool, **more: Any):
        self.kind, self.folder, self.is_elastic, self.more = kind, folder, is_elastic, more

    def __call__(self) -> None:
        trainer_class, config_class = getattr(trl, f"{self.kind}Trainer"), getattr(trl, f"{self.kind}Config")
        if self.is_elastic:
            trainer_class = type("Elastic", (self.more.get("mixin", ElasticMixin), trainer_class), {})
            config_class = type("Config", (PlannedArguments, config_class), {})
        args = config_class(
            output_dir=str(self.folder),
            per_device_train_batch_size=self.more.get("batch", 8),
            max_steps=self.more.get("steps", 4),
            learning_rate=1e-2,
            logging_steps=self.more.get("logging_steps", 1),
            save_strategy="no",
            optim="adamw_torch",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **({"train_sampling_strategy": "sequential"} if HAS_STRATEGY else {}),
        )
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=43, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
                            embd_pdrop=0.0, attn_pdrop=0.0, num_labels=1, pad_token_id=0, bos_token_id=1, eos_token_id=1)  # fmt: skip
        model = GPT2ForSequenceClassification(config) if self.kind == "Reward" else GPT2LMHeadModel(config)
        reference = {"ref_model": copy.deepcopy(model)} if self.kind == "DPO" else {}
        trainer = trainer_class(
            model=model, args=args, train_dataset=rows(self.kind), processing_class=tokenizer(), **reference
        )
        trainer.train()
        self.logs = [log for log in trainer.state.log_history if "loss" in log]
        self.process_index = args.process_index


KINDS = ["SFT", "DPO", "Reward"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_of_trl_has_its_own_losses_and_metrics(kind: str, tmp_path: Path) -> None:
    theirs, ours = Script(kind, tmp_path / "theirs", is_elastic=False), Script(kind, tmp_path / "ours", is_elastic=True)
    theirs()
    train_here(ours, tmp_path, *IN_ORDER)
    assert len(ours.logs) == 4
    for our, their in zip(ours.logs, theirs.logs, strict=True):
        assert our["loss"] == pytest.approx(their["loss"], abs=2e-5)
        assert our.keys() == their.keys()


@pytest.mark.parametrize(
    ("kind", "stage"), [("SFT", 0), ("DPO", 3), *at_night([("SFT", 3), ("DPO", 0), ("Reward", 0), ("Reward", 3)])]
)
def test_neither_the_number_of_ranks_nor_sharding_changes_a_bit_of_a_trainer_of_trl(
    kind: str, stage: int, tmp_path: Path
) -> None:
    script = Script(kind, tmp_path / "out", is_elastic=True, batch=2)
    settings = ("deterministic=true", *IN_ORDER)
    sharding = f"sharding.stage={stage}"
    job = renamed(job_of_script(script, tmp_path, *settings, sharding, virtual_workers=4), "two")
    alone = train_here(script, tmp_path, *settings, virtual_workers=4)
    on_ranks(2, train_rank, script, job)
    names = ("loss", "grad_norm", "sample_digest", "weights_digest")
    assert columns(job, *names) == columns(alone, *names)


class DividesByTokens(ElasticMixin):
    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **more: Any) -> Any:
        tokens = self.accelerator.gather(inputs["attention_mask"].sum()).sum().item()
        return super().compute_loss(model, inputs, *arguments, **more) * (1.0 / tokens)


def test_a_loss_that_is_scaled_by_a_gathered_count_is_refused(tmp_path: Path) -> None:
    script = Script("SFT", tmp_path / "out", is_elastic=True, mixin=DividesByTokens)
    with pytest.raises(
        UsageError, match=r"^what accelerator.gather\(\) returned in a training step is used for the loss"
    ):
        train_here(script, tmp_path, *IN_ORDER)
