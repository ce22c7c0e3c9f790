"""ResNet-18 on images from Parquet: scikit-learn's digits by default, CIFAR-10 where its data set is named."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import undula
from resnet import ResNet18, ResNetConfig


@dataclass(frozen=True)
class Config:
    """The `config` part of the YAML."""

    model: ResNetConfig = field(default_factory=ResNetConfig)
    momentum: float = 0.9
    weight_decay: float = 5e-4


def train(run: undula.Run) -> None:
    model = run.model(ResNet18(run.config.model))
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=run.base_lr,
        momentum=run.config.momentum,
        weight_decay=run.config.weight_decay,
        nesterov=True,
    )
    run.optimizer(optimizer)

    def logits(batch):
        return model(batch["image"].float() / 127.5 - 1)

    def loss(batch):
        return F.cross_entropy(logits(batch), batch["label"])

    for step in run.steps(validate=loss):
        for batch in step.batches():
            scores = logits(batch)
            step.log(accuracy=(scores.argmax(1) == batch["label"]).float().mean())
            step.backward(F.cross_entropy(scores, batch["label"]))
        step.update()


if __name__ == "__main__":
    undula.main(train, config=Config)
