"""Trains a small model of characters as nanoGPT does: blocks of a text, accumulation, a cosine with warmup, clipping."""

import math

import torch
import torch.nn.functional as F
from shapes import TEXT
from torch import nn

import undula

BLOCK, WARMUP, STEPS = 16, 5, 40


class Model(nn.Module):
    def __init__(self, characters: int):
        super().__init__()
        self.embed, self.place = nn.Embedding(characters, 32), nn.Embedding(BLOCK, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, characters)

    def forward(self, tokens):
        hidden = self.embed(tokens) + self.place.weight
        return self.head(self.block(hidden, nn.Transformer.generate_square_subsequent_mask(BLOCK), is_causal=True))


def rate(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min((step - WARMUP) / (STEPS - WARMUP), 1.0)))


class Blocks(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data) - BLOCK

    def __getitem__(self, start):
        return self.data[start : start + BLOCK], self.data[start + 1 : start + 1 + BLOCK]


def train(run):
    characters = sorted(set(TEXT))
    run.dataset(Blocks(torch.tensor([characters.index(character) for character in TEXT])))
    torch.manual_seed(1)
    model = run.model(Model(len(characters)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.base_lr, betas=(0.9, 0.95))
    run.optimizer(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate))
    for step in run.steps():
        for inputs, targets in step.batches():
            step.backward(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
        step.update()


if __name__ == "__main__":
    undula.main(train)
