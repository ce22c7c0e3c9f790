"""ResNet-18 in its CIFAR variant: a 3x3 stem and no pooling before the four stages (He et al. 2015, section 4.2's stem on the
18-layer network of table 1)."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ResNetConfig:
    """Size of the model. The defaults are ResNet-18 for CIFAR-10, 11.2 M parameters."""

    channels: int = 3
    classes: int = 10
    width: int = 64
    """Channels of the first stage; they double at each of the three others."""


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation, and a way past them."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = nn.Sequential(convolution(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs), nn.ReLU())
        self.second = nn.Sequential(convolution(outputs, outputs, 3), nn.BatchNorm2d(outputs))
        self.past: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.past = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.past(x))


class ResNet18(nn.Module):
    """Logits of the classes. [batch, channels, height, width] -> [batch, classes]"""

    def __init__(self, config: ResNetConfig):
        super().__init__()
        width = config.width
        self.stem = nn.Sequential(convolution(config.channels, width, 3), nn.BatchNorm2d(width), nn.ReLU())
        blocks, inputs = [], width
        for stage in range(4):
            outputs = width * 2**stage
            for block in range(2):
                blocks.append(BasicBlock(inputs, outputs, stride=2 if stage and not block else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.classes = nn.Linear(inputs, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classes(self.blocks(self.stem(images)).mean(dim=(2, 3)))
