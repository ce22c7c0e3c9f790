"""A small GPT over bytes: pre-norm transformer blocks, learned positions, tied embeddings."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """Size of the model. The defaults make about 0.9 M parameters."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    context: int = 256
    """Bytes that the model sees at once."""
    dropout: float = 0.0


class Block(nn.Module):
    """Attention, then a perceptron, each on a normalised copy and added back."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # [batch, length, 3 width] -> three of [batch, heads, length, width / heads]
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + F.dropout(hidden, self.dropout, self.training)


class GPT(nn.Module):
    """Logits of the next byte. [batch, length] -> [batch, length, 256]"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return F.linear(self.norm(self.blocks(x)), self.bytes.weight)
