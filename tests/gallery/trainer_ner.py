"""Labels tokens as the Trainer's examples do: a loss with weights of classes, F1 of entities, a callback, an optimizer of its own."""

import argparse
import random

import numpy as np
import torch
from datasets import Dataset
from sklearn.metrics import precision_recall_fscore_support
from torch import nn
from transformers import (
    DistilBertConfig,
    DistilBertForTokenClassification,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
    set_seed,
)
from transformers.trainer_callback import ExportableState

from undula.adapters.transformers import Trainer, launch

LABELS = ["O", "B-PER", "I-PER", "B-LOC"]


def sentences(seed, rows):
    generator = random.Random(seed)
    tokens, tags = [], []
    for _ in range(rows):
        words, labels = [], []
        while len(words) < 8:
            kind = generator.choices(("word", "person", "place"), (6, 1, 1))[0]
            if kind == "word":
                words, labels = [*words, generator.randrange(1, 20)], [*labels, 0]
            elif kind == "person":
                words, labels = [*words, generator.randrange(20, 26), generator.randrange(15, 30)], [*labels, 1, 2]
            else:
                words, labels = [*words, generator.randrange(26, 34)], [*labels, 3]
        length = generator.randint(5, 8)
        tokens.append(words[:length])
        tags.append(labels[:length])
    return Dataset.from_dict({"input_ids": tokens, "ner_tags": tags})


def collate(features):
    length = max(len(each["input_ids"]) for each in features)
    pad = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [
        {
            "input_ids": each["input_ids"],
            "labels": each["ner_tags"],
            "attention_mask": [1] * len(each["input_ids"]),
        }
        for each in features
    ]
    return {
        name: torch.tensor([row[name] + [value] * (length - len(row[name])) for row in rows])
        for name, value in pad.items()
    }


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss_fct = nn.CrossEntropyLoss(weight=self.class_weights.to(model.device))
        loss = loss_fct(outputs.logits.view(-1, len(LABELS)), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


class BestF1(TrainerCallback, ExportableState):
    def __init__(self):
        self.best = 0.0

    def state(self):
        return {"args": {}, "attributes": {"best": self.best}}

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if metrics["eval_f1"] > self.best:
            self.best = metrics["eval_f1"]
            control.should_save = True
        if state.is_world_process_zero:
            print(f"step {state.global_step}: f1 {metrics['eval_f1']:.3f}, best {self.best:.3f}")


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    known = labels != -100
    precision, recall, f1, _ = precision_recall_fscore_support(
        labels[known], np.argmax(logits, axis=-1)[known], labels=[1, 2, 3], average="micro", zero_division=0
    )
    return {"precision": precision, "recall": recall, "f1": f1}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=float, default=4)
    cli = parser.parse_args()
    set_seed(11)
    train_dataset, eval_dataset = sentences(0, 96), sentences(1, 24)
    model = DistilBertForTokenClassification(
        DistilBertConfig(
            vocab_size=40,
            dim=16,
            hidden_dim=32,
            n_layers=2,
            n_heads=2,
            max_position_embeddings=16,
            id2label=dict(enumerate(LABELS)),
            label2id={label: number for number, label in enumerate(LABELS)},
        )
    )
    counts = np.bincount(np.concatenate(train_dataset["ner_tags"]), minlength=len(LABELS))
    weights = torch.tensor(counts.sum() / (len(LABELS) * counts), dtype=torch.float32)
    args = TrainingArguments(
        output_dir="ner",
        per_device_train_batch_size=8,
        num_train_epochs=cli.epochs,
        eval_strategy="steps",
        eval_steps=6,
        logging_steps=6,
        save_strategy="no",
        max_grad_norm=1.0,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": model.distilbert.parameters(), "lr": 5e-3},
            {"params": model.classifier.parameters(), "lr": 2e-2},
        ]
    )
    steps = int(cli.epochs * len(train_dataset) / args.per_device_train_batch_size)
    trainer = WeightedTrainer(
        model,
        args,
        data_collator=collate,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
        class_weights=weights,
        callbacks=[BestF1()],
        optimizers=(optimizer, get_scheduler("polynomial", optimizer, 2, steps)),
    )
    trainer.train()
    trainer.save_model("ner-final")


if __name__ == "__main__":
    launch(main)
