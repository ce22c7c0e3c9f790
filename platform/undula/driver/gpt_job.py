"""Script of a decoder-only transformer by its size, which `undula plan --parameters` counts. Its text is made up."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import undula


@dataclass(frozen=True)
class Config:
    """The `config` part of the YAML."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    sequences: int
    """Number of sequences of the run."""
    optimizer: undula.OptimizerConfig


class Block(nn.Module):
    """Attention, then a perceptron, each on a normalised copy and added back."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # [batch, length, 3 width] -> three of [batch, heads, length, width / heads]
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + hidden


class Gpt(nn.Module):
    """Logits of the next token. [batch, length] -> [batch, length, vocabulary]"""

    def __init__(self, config: Config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config.width, config.heads) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences of tokens, and of those that follow them."""

    def __init__(self, count: int, context: int):
        self._count, self._tokens = count, torch.zeros(context, dtype=torch.long, device="cpu")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self._tokens, "targets": self._tokens}


def train(run: undula.Run) -> None:
    config: Config = run.config
    run.dataset(Sequences(config.sequences, config.context))
    model = run.model(Gpt(config))
    run.optimizer(undula.make_optimizer(model, config.optimizer, run.base_lr))
    for step in run.steps():
        for batch in step.batches():
            step.backward(F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()))
        step.update()


if __name__ == "__main__":
    undula.main(train, config=Config)
