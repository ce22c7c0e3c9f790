"""Trains a vision transformer as run_image_classification does: a transform that augments on the fly, names of labels, mixed intervals."""

import argparse

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from shapes import Shapes
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

NAMES = ["horizontal", "vertical", "diagonal"]


def images(shapes):
    features = Features({"image": List(List(Value("float32"))), "label": ClassLabel(names=NAMES)})
    rows = [shapes[index] for index in range(len(shapes))]
    columns = {"image": [image[0].tolist() for image, _ in rows], "label": [label for _, label in rows]}
    return Dataset.from_dict(columns, features=features)


def train_transforms(examples):
    pixels = [torch.tensor(image)[None] for image in examples["image"]]
    flipped = [
        image.flip(2) if torch.rand(()) < 0.5 and label < 2 else image
        for image, label in zip(pixels, examples["label"], strict=True)
    ]
    return {"pixel_values": [image + 0.05 * torch.randn_like(image) for image in flipped], "label": examples["label"]}


def val_transforms(examples):
    return {"pixel_values": [torch.tensor(image)[None] for image in examples["image"]], "label": examples["label"]}


def collate_fn(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    return {"pixel_values": pixel_values, "labels": torch.tensor([example["label"] for example in examples])}


class Unfreeze(TrainerCallback):
    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        if state.epoch is not None and state.epoch >= 1:
            model.vit.embeddings.requires_grad_(True)


def compute_metrics(p):
    return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=float, default=4)
    cli = parser.parse_args()
    set_seed(21)
    dataset = images(Shapes(0, 120)).train_test_split(0.2, seed=21, stratify_by_column="label")
    dataset["train"].set_transform(train_transforms)
    dataset["test"].set_transform(val_transforms)
    labels = dataset["train"].features["label"].names
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=12,
        patch_size=3,
        num_channels=1,
        label2id={label: number for number, label in enumerate(labels)},
        id2label=dict(enumerate(labels)),
    )
    model = ViTForImageClassification(config)
    model.vit.embeddings.requires_grad_(False)
    args = TrainingArguments(
        output_dir="vit",
        per_device_train_batch_size=8,
        num_train_epochs=cli.epochs,
        learning_rate=5e-3,
        warmup_steps=0.1,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="steps",
        logging_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        save_total_limit=2,
        remove_unused_columns=False,
        dataloader_num_workers=1,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        compute_metrics=compute_metrics,
        data_collator=collate_fn,
        callbacks=[Unfreeze()],
    )
    result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
