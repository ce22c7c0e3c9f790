"""Trains a convolutional network as PyTorch's MNIST example does: Adadelta, StepLR, dropout, a test after each epoch."""

import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn
from torch.optim.lr_scheduler import StepLR

import undula


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(8 * 4 * 4, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc(self.dropout(torch.flatten(x, 1))), dim=1)


def train(run):
    run.dataset(Shapes(), validation=Shapes(1000, 30))
    torch.manual_seed(1)
    model = run.model(Net())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=run.base_lr)
    run.optimizer(optimizer, StepLR(optimizer, step_size=6, gamma=0.7))

    def test(batch):
        data, target = batch
        output = model(data)
        correct = output.argmax(dim=1).eq(target).float().mean()
        return {"loss": F.nll_loss(output, target), "accuracy": correct}

    for step in run.steps(validate=test):
        for data, target in step.batches():
            step.backward(F.nll_loss(model(data), target))
        step.update()


if __name__ == "__main__":
    undula.main(train)
