"""Fine-tunes a causal language model with LoRA, as PEFT's examples do."""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from shapes import TEXT
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

LENGTH = 16


class Tokenizer:
    """What the collator needs of a tokenizer."""

    pad_token_id, mask_token, padding_side, init_kwargs = 0, None, "right", {}
    is_fast = True

    def pad(self, examples, **options):
        return {name: torch.tensor([each[name] for each in examples]) for name in examples[0]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=float, default=3)
    cli = parser.parse_args()
    set_seed(42)
    characters = ["<pad>", *sorted(set(TEXT))]
    ids = [characters.index(character) for character in TEXT]
    rows = [{"input_ids": ids[start : start + LENGTH]} for start in range(0, 1600, LENGTH)]
    config = GPT2Config(vocab_size=len(characters), n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
    model = get_peft_model(
        GPT2LMHeadModel(config), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], lora_dropout=0.1)
    )
    model.print_trainable_parameters()
    args = TrainingArguments(
        output_dir="lora",
        per_device_train_batch_size=4,
        num_train_epochs=cli.epochs,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=Dataset.from_list(rows),
        data_collator=DataCollatorForLanguageModeling(Tokenizer(), mlm=False),
    )
    trainer.train()
    model.save_pretrained("lora-adapter")


if __name__ == "__main__":
    main()
