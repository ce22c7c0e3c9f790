"""Classifies texts as Lightning's tutorial on transformers does: a model of theirs in a module, outputs kept for F1, groups, warmup."""

import argparse
import random

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassF1Score
from transformers import DistilBertConfig, DistilBertForSequenceClassification, get_linear_schedule_with_warmup

from undula.adapters.lightning import Trainer, launch


class Texts(Dataset):
    def __init__(self, seed, rows):
        generator = random.Random(seed)
        self.rows = []
        for _ in range(rows):
            label = generator.randrange(3)
            tokens = [generator.randrange(1, 20) for _ in range(generator.randint(5, 9))]
            tokens[generator.randrange(len(tokens))] = 20 + 3 * label + generator.randrange(3)
            self.rows.append((tokens, label))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        tokens, label = self.rows[index]
        return {"input_ids": tokens, "labels": label}


def collate(features):
    length = max(len(each["input_ids"]) for each in features)
    ids = torch.tensor([each["input_ids"] + [0] * (length - len(each["input_ids"])) for each in features])
    labels = torch.tensor([each["labels"] for each in features])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


class TextDataModule(pl.LightningDataModule):
    def prepare_data(self):
        print("nothing to download")

    def setup(self, stage):
        self.train, self.val = Texts(0, 96), Texts(1, 30)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True, collate_fn=collate)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8, collate_fn=collate)


class TextTransformer(pl.LightningModule):
    def __init__(self, learning_rate=3e-3, warmup_steps=4, weight_decay=0.1):
        super().__init__()
        self.save_hyperparameters()
        config = DistilBertConfig(
            vocab_size=30, dim=16, hidden_dim=32, n_layers=2, n_heads=2, max_position_embeddings=16, num_labels=3
        )
        self.model = DistilBertForSequenceClassification(config)
        self.f1 = MulticlassF1Score(3)

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        return self(**batch).loss

    def validation_step(self, batch, batch_idx):
        outputs = self(**batch)
        self.f1(outputs.logits.argmax(dim=1), batch["labels"])
        self.log("val_loss", outputs.loss, prog_bar=True)
        self.log("val_f1", self.f1, prog_bar=True)
        return outputs.loss

    def configure_optimizers(self):
        no_decay = ("bias", "LayerNorm.weight")
        named = list(self.model.named_parameters())
        groups = [
            {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": self.hparams.weight_decay},
            {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, eps=1e-8)
        scheduler = get_linear_schedule_with_warmup(
            optimizer, self.hparams.warmup_steps, self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    pl.seed_everything(42)
    trainer = Trainer(
        max_epochs=args.epochs,
        accelerator="auto",
        devices=1,
        accumulate_grad_batches=2,
        logger=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(TextTransformer(), datamodule=TextDataModule())


if __name__ == "__main__":
    launch(main)
