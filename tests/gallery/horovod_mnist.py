"""Trains a convolutional network as Horovod's PyTorch example does: broadcasts, a rate times the size, warmup, averaged metrics."""

import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn

import undula


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 3), nn.Conv2d(10, 20, 3)
        self.conv2_drop = nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(80, 24), nn.Linear(24, 3)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(self.conv2_drop(self.conv2(x)))[:, :, :2, :2]
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def train(run):
    run.dataset(Shapes(), validation=Shapes(1000, 30))
    torch.manual_seed(42)
    model = run.model(Net())
    run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr, momentum=0.5))

    def test(batch):
        data, target = batch
        output = model(data)
        return {"loss": F.nll_loss(output, target), "accuracy": output.argmax(dim=1).eq(target).float().mean()}

    for step in run.steps(test):
        for data, target in step.batches():
            step.backward(F.nll_loss(model(data), target))
        step.update()


if __name__ == "__main__":
    undula.main(train)
