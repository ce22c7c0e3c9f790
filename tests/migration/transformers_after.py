"""Fine-tunes a small language model with Hugging Face's Trainer: `undula run transformers_after.yaml`."""

import sys

from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from undula.adapters.transformers import Trainer, launch

LENGTH, TOKENS = 12, 50


def sequences(first: int, rows: int) -> Dataset:
    numbers = range(first, first + rows)
    tokens = [[(place * (1 + number % 7) + number) % TOKENS for place in range(LENGTH)] for number in numbers]
    return Dataset.from_dict({"input_ids": tokens, "labels": tokens})


def main() -> None:
    set_seed(42)
    size = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**size, **no_dropout, bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(
        output_dir=sys.argv[1] if len(sys.argv) > 1 else "models",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        train_sampling_strategy="sequential",
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=sequences(0, 200), eval_dataset=sequences(200, 40))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    launch(main)
