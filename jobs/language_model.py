"""A byte-level language model on the standard library's own source."""

from dataclasses import dataclass, field

import torch.nn.functional as F

import undula
from gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Config:
    """The `config` part of the YAML."""

    model: GPTConfig = field(default_factory=GPTConfig)
    optimizer: undula.OptimizerConfig = field(
        default_factory=lambda: undula.OptimizerConfig(name="adamw", weight_decay=0.1)
    )


def train(run: undula.Run) -> None:
    model = run.model(GPT(run.config.model))
    run.optimizer(undula.make_optimizer(model, run.config.optimizer, run.base_lr))

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
