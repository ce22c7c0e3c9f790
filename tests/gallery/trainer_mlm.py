"""Trains a masked language model as the Trainer's examples do: the collator masks tokens at random, in loader processes."""

import argparse

import torch
from shapes import TEXT
from transformers import BertConfig, BertForMaskedLM, EarlyStoppingCallback, TrainingArguments, set_seed

from undula.adapters.transformers import Trainer, launch

LENGTH, MASK = 16, 1


def mask(rows):
    tokens = torch.tensor(rows)
    labels = tokens.clone()
    chosen = torch.rand(tokens.shape) < 0.2
    labels[~chosen] = -100
    return {"input_ids": tokens.masked_fill(chosen, MASK), "labels": labels}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=float, default=3)
    cli = parser.parse_args()
    set_seed(42)
    characters = ["<pad>", "<mask>", *sorted(set(TEXT))]
    ids = [characters.index(character) for character in TEXT]
    rows = [ids[start : start + LENGTH] for start in range(0, 1600, LENGTH)]
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForMaskedLM(BertConfig(vocab_size=len(characters), max_position_embeddings=LENGTH, **sizes))
    args = TrainingArguments(
        output_dir="mlm",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=cli.epochs,
        learning_rate=5e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        max_grad_norm=0.5,
        dataloader_num_workers=1,
        eval_strategy="steps",
        eval_steps=10,
        logging_steps=5,
        save_strategy="no",
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        args,
        data_collator=mask,
        train_dataset=rows[:80],
        eval_dataset=rows[80:],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1000)],
    )
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    launch(main)
