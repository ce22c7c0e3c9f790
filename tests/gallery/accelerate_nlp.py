"""Trains a text classifier as Accelerate's examples without a Trainer do: accumulation, clipping, a logger, weight decay by groups."""

import argparse
import logging
import math

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

from undula.adapters.accelerate import Accelerator, launch

logger = get_logger(__name__)


def sentences(rows):
    ids = [
        [(number * 7 + place * (1 + number % 3)) % 40 + 1 for place in range(8 + number % 5)] for number in range(rows)
    ]
    return Dataset.from_dict({"input_ids": ids, "labels": [number % 3 for number in range(rows)]})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    logging.basicConfig(level=logging.INFO)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(3)

    def collate(rows):
        longest = None if accelerator.distributed_type != DistributedType.XLA else 16
        length = longest or max(len(row["input_ids"]) for row in rows)
        ids = [row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows]
        mask = [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows]
        labels = [row["labels"] for row in rows]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}

    data = sentences(112)
    train_dataloader = DataLoader(data.select(range(96)), shuffle=True, collate_fn=collate, batch_size=4)
    eval_dataloader = DataLoader(data.select(range(96, 112)), collate_fn=collate, batch_size=4)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))
    no_decay = ("bias", "LayerNorm.weight")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.endswith(no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    steps = args.epochs * math.ceil(len(train_dataloader) / 2)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=4, num_training_steps=steps)
    model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, scheduler
    )
    logger.info("***** Running training *****")
    for epoch in accelerator.epochs(args.epochs):
        model.train()
        total_loss = 0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        correct = count = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += (predictions == references).sum().item()
            count += len(references)
        logger.info(f"epoch {epoch}: accuracy {correct / count:.3f}, train loss {total_loss.item():.3f}")
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained("bert", save_function=accelerator.save)


if __name__ == "__main__":
    launch(main)
