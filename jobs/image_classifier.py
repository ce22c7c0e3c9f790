"""ResNet-18 on images from Parquet: scikit-learn's digits by default, CIFAR-10 where its data set is named."""

from dataclasses import dataclass, field

import torch.nn.functional as F

import undula
from resnet import ResNet18, ResNetConfig


@dataclass(frozen=True)
class Config:
    """The `config` part of the YAML."""

    model: ResNetConfig = field(default_factory=ResNetConfig)
    optimizer: undula.OptimizerConfig = field(
        default_factory=lambda: undula.OptimizerConfig(name="sgd", nesterov=True, weight_decay=5e-4)
    )


def train(run: undula.Run) -> None:
    model = run.model(ResNet18(run.config.model))
    run.optimizer(undula.make_optimizer(model, run.config.optimizer, run.base_lr))

    def logits(batch):
        return model(batch["image"].float() / 127.5 - 1)

    def validate(batch):
        scores = logits(batch)
        return {
            "loss": F.cross_entropy(scores, batch["label"]),
            "accuracy": (scores.argmax(1) == batch["label"]).float().mean(),
        }

    for step in run.steps(validate=validate):
        for batch in step.batches():
            scores = logits(batch)
            step.log(accuracy=(scores.argmax(1) == batch["label"]).float().mean())
            step.backward(F.cross_entropy(scores, batch["label"]))
        step.update()


if __name__ == "__main__":
    undula.main(train, config=Config)
