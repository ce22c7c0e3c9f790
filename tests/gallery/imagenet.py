"""Trains an image classifier as PyTorch's ImageNet example does: DDP, random crops, StepLR, top-k accuracy, the best checkpoint."""

import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

import undula


class Augmented(Dataset):
    def __init__(self, shapes):
        self.shapes = shapes

    def __len__(self):
        return len(self.shapes)

    def __getitem__(self, index):
        image, label = self.shapes[index]
        top, left = torch.randint(3, (2,)).tolist()
        image = F.pad(image, (1, 1, 1, 1))[:, top : top + 12, left : left + 12]
        return (image.flip(2) if torch.rand(()) < 0.5 else image), label


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, 2, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, 2)

    def forward(self, x):
        hidden = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(hidden)) + self.shortcut(x))


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(Block(1, 8), Block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


def accuracy(output, target, topk):
    with torch.no_grad():
        ranked = output.topk(max(topk), dim=1).indices
        return [ranked[:, :k].eq(target[:, None]).any(dim=1).float().mean() for k in topk]


def train(run):
    run.dataset(Augmented(Shapes()), validation=Shapes(1000, 30))
    model = run.model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), run.base_lr, momentum=0.9, weight_decay=1e-4)
    run.optimizer(optimizer, StepLR(optimizer, step_size=2 * run.plan.steps_per_epoch, gamma=0.1))

    def validate(batch):
        images, target = batch
        output = model(images)
        acc1, acc2 = accuracy(output, target, topk=(1, 2))
        return {"loss": F.cross_entropy(output, target), "acc1": acc1, "acc2": acc2}

    for step in run.steps(validate):
        for images, target in step.batches():
            output = model(images)
            acc1, acc2 = accuracy(output, target, topk=(1, 2))
            step.log(acc1=acc1, acc2=acc2)
            step.backward(F.cross_entropy(output, target))
        step.update()


if __name__ == "__main__":
    undula.main(train)
