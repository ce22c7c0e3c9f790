"""Trains a small model of characters as nanoGPT does: blocks of a text, accumulation, a cosine with warmup, clipping."""

import argparse
import math

import torch
import torch.nn.functional as F
from shapes import TEXT
from torch import nn

BLOCK, BATCH, ACCUMULATE, WARMUP, STEPS = 16, 4, 2, 5, 40


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


def get_batch(data):
    starts = torch.randint(len(data) - BLOCK - 1, (BATCH,))
    return torch.stack([data[i : i + BLOCK] for i in starts]), torch.stack(
        [data[i + 1 : i + 1 + BLOCK] for i in starts]
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    characters = sorted(set(TEXT))
    data = torch.tensor([characters.index(character) for character in TEXT])
    torch.manual_seed(1)
    model = Model(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate(step)
        for _ in range(ACCUMULATE):
            inputs, targets = get_batch(data)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            (loss / ACCUMULATE).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    torch.save(model.state_dict(), "nanogpt.pt")


if __name__ == "__main__":
    main()
