"""Job that trains a small language model with Hugging Face's Trainer, for the test that runs it under faults."""

import argparse
import time
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from undula.adapters.transformers import Trainer, launch

LENGTH, TOKENS = 12, 50


class Sequences(Dataset[dict[str, Any]]):
    """Sequences that count upwards by a step of their own."""

    def __init__(self, first: int, rows: int):
        self._first, self._rows = first, rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self._first + index
        tokens = (torch.arange(LENGTH) * (1 + number % 7) + number) % TOKENS
        labels = tokens.clone()
        labels[: number % 5] = -100
        return {"input_ids": tokens, "labels": labels}


class Pace(TrainerCallback):  # type: ignore[misc]
    """Callback that makes each step take a minimum time, because faults are scheduled by step."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(max(self._began + self._seconds - time.monotonic(), 0.0))
        self._began = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--loaders", type=int, default=0)
    options = parser.parse_args()
    args = TrainingArguments(
        output_dir="models",
        per_device_train_batch_size=4,
        max_steps=options.steps,
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        eval_strategy="steps",
        eval_steps=15,
        save_steps=40,
        save_total_limit=2,
        logging_steps=5,
        dataloader_num_workers=options.loaders,
        report_to="none",
        disable_tqdm=True,
    )
    size = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    data = {"train_dataset": Sequences(0, 500), "eval_dataset": Sequences(500, 60)}
    Trainer(model, args, callbacks=[Pace(options.pace)], **data).train()


if __name__ == "__main__":
    launch(main)
