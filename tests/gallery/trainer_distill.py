"""Distils a teacher into a student with a Trainer whose loss is the script's own."""

import argparse

import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainingArguments, set_seed

from undula.adapters.transformers import Trainer, launch


class Images(Dataset):
    def __init__(self, shapes):
        self.shapes = shapes

    def __len__(self):
        return len(self.shapes)

    def __getitem__(self, index):
        image, label = self.shapes[index]
        return {"image": image.flatten(), "labels": torch.tensor(label)}


class Classifier(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(144, width), nn.GELU(), nn.Linear(width, 3))

    def forward(self, image, labels=None):
        return {"logits": self.net(image)}


class Distiller(Trainer):
    def __init__(self, *args, teacher, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = F.softmax(self.teacher(inputs["image"])["logits"], dim=-1)
        loss = 0.5 * F.cross_entropy(outputs["logits"], inputs["labels"])
        loss = loss + 0.5 * F.kl_div(F.log_softmax(outputs["logits"], dim=-1), wanted, reduction="batchmean")
        return (loss, outputs) if return_outputs else loss


def compute_metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=float, default=3)
    cli = parser.parse_args()
    set_seed(0)
    args = TrainingArguments(
        output_dir="student",
        per_device_train_batch_size=8,
        num_train_epochs=cli.epochs,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=10,
        logging_steps=5,
        save_strategy="no",
        label_names=["labels"],
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Distiller(
        Classifier(8),
        args,
        train_dataset=Images(Shapes()),
        eval_dataset=Images(Shapes(1000, 30)),
        compute_metrics=compute_metrics,
        teacher=Classifier(32).eval(),
    )
    trainer.train()


if __name__ == "__main__":
    launch(main)
