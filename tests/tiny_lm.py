"""Small language model of Hugging Face, and token sequences to train it on."""

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS, LENGTH = 50, 12


class Sequences(Dataset[dict[str, Any]]):
    """Sequences that count upwards by a step of their own, of which the first tokens have no label in some."""

    def __init__(self, rows: int, first: int = 0):
        self._rows, self._first = rows, first

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self._first + index
        tokens = (torch.arange(LENGTH) * (1 + number % 7) + number) % TOKENS
        labels = tokens.clone()
        labels[: number % 5] = -100
        return {"input_ids": tokens, "labels": labels}


def tiny_gpt(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=TOKENS,
            n_positions=LENGTH,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )
