"""A byte-level language model on the standard library's own source."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import undula
from gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Config:
    """The `config` part of the YAML."""

    model: GPTConfig = field(default_factory=GPTConfig)
    weight_decay: float = 0.1


def train(run: undula.Run) -> None:
    model = run.model(GPT(run.config.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.base_lr, weight_decay=run.config.weight_decay)
    run.optimizer(optimizer)

    def loss(batch):
        text = batch["text"].long()
        logits = model(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    for step in run.steps(validate=loss):
        for batch in step.batches():
            step.backward(loss(batch))
        step.update()


if __name__ == "__main__":
    undula.main(train, config=Config)
