"""Trains a convolutional network as Horovod's PyTorch example does: broadcasts, a rate times the size, warmup, averaged metrics."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

WARMUP_EPOCHS = 1


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


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def adjust_learning_rate(optimizer, epoch, batch, batches, lr):
    progress = epoch + batch / batches
    factor = 1.0 if epoch < 3 else 0.1
    if progress < WARMUP_EPOCHS:
        factor = (1 + progress / WARMUP_EPOCHS * (hvd.size() - 1)) / hvd.size()
    for group in optimizer.param_groups:
        group["lr"] = lr * hvd.size() * factor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--fp16-allreduce", action="store_true")
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    train_data, test_data = Shapes(), Shapes(1000, 30)
    train_sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_data, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler = DistributedSampler(test_data, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_data, batch_size=args.batch_size, sampler=test_sampler)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    for epoch in range(args.epochs):
        model.train()
        train_sampler.set_epoch(epoch)
        for batch, (data, target) in enumerate(train_loader):
            adjust_learning_rate(optimizer, epoch, batch, len(train_loader), args.lr)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if batch % 4 == 0 and hvd.rank() == 0:
                print(f"Train Epoch: {epoch} [{batch * len(data)}/{len(train_sampler)}]\tLoss: {loss.item():.6f}")
        model.eval()
        test_loss = test_accuracy = 0.0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                test_accuracy += output.argmax(dim=1).eq(target).float().sum().item()
        test_loss = metric_average(test_loss / len(test_sampler), "avg_loss")
        test_accuracy = metric_average(test_accuracy / len(test_sampler), "avg_accuracy")
        if hvd.rank() == 0:
            print(f"Test set: Average loss: {test_loss:.4f}, Accuracy: {100 * test_accuracy:.2f}%")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"checkpoint-{epoch}.pt")


if __name__ == "__main__":
    main()
