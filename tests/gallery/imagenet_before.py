"""Trains an image classifier as PyTorch's ImageNet example does: DDP, random crops, StepLR, top-k accuracy, the best checkpoint."""

import argparse
import shutil
import socket
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shapes import Shapes
from torch import multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler


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


class AverageMeter:
    def __init__(self, name):
        self.name, self.total, self.count, self.value = name, 0.0, 0, 0.0

    def update(self, value, count=1):
        self.value, self.total, self.count = value, self.total + value * count, self.count + count

    def all_reduce(self):
        total = torch.tensor([self.total, self.count])
        dist.all_reduce(total)
        self.total, self.count = total.tolist()

    def __str__(self):
        return f"{self.name} {self.value:6.3f} ({self.total / self.count:6.3f})"


def accuracy(output, target, topk):
    with torch.no_grad():
        ranked = output.topk(max(topk), dim=1).indices
        return [ranked[:, :k].eq(target[:, None]).any(dim=1).float().mean() for k in topk]


def train(loader, model, optimizer, epoch, args):
    meters = [AverageMeter(name) for name in ("Time", "Loss", "Acc@1", "Acc@2")]
    model.train()
    end = time.time()
    for batch, (images, target) in enumerate(loader):
        output = model(images)
        loss = F.cross_entropy(output, target)
        values = (loss.item(), *(each.item() for each in accuracy(output, target, topk=(1, 2))))
        for meter, value in zip(meters[1:], values, strict=True):
            meter.update(value, len(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meters[0].update(time.time() - end)
        end = time.time()
        if batch % args.print_freq == 0 and dist.get_rank() == 0:
            print(f"Epoch: [{epoch}][{batch}/{len(loader)}]", *meters, sep="\t")


def validate(loader, model):
    meters = [AverageMeter(name) for name in ("Loss", "Acc@1", "Acc@2")]
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            values = (F.cross_entropy(output, target), *accuracy(output, target, topk=(1, 2)))
            for meter, value in zip(meters, values, strict=True):
                meter.update(value.item(), len(images))
    for meter in meters:
        meter.all_reduce()
    if dist.get_rank() == 0:
        print("Test:", *meters, sep="\t")
    return meters[1].total / meters[1].count


def main_worker(rank, args, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.world_size)
    batch = args.batch_size // args.world_size
    sampler = DistributedSampler(Augmented(Shapes()))
    train_loader = DataLoader(sampler.dataset, batch_size=batch, sampler=sampler)
    val_data = Shapes(1000, 30)
    val_loader = DataLoader(val_data, batch_size=batch, sampler=DistributedSampler(val_data, shuffle=False))
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    start_epoch, best = 0, 0.0
    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        start_epoch, best = checkpoint["epoch"], checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        train(train_loader, model, optimizer, epoch, args)
        acc1 = validate(val_loader, model)
        scheduler.step()
        is_best, best = acc1 > best, max(acc1, best)
        if rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            states |= {"scheduler": scheduler.state_dict(), "epoch": epoch + 1, "best_acc1": best}
            torch.save(states, "checkpoint.pt")
            if is_best:
                shutil.copyfile("checkpoint.pt", "model_best.pt")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="of all processes")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--print-freq", type=int, default=4)
    parser.add_argument("--resume", default="")
    parser.add_argument("--world-size", type=int, default=2)
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(main_worker, nprocs=args.world_size, args=(args, port))


if __name__ == "__main__":
    main()
