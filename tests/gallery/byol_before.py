"""Learns representations without labels as the libraries for self-supervision do: two views, a target that is an average, a probe."""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn
from torch.utils.data import DataLoader, Dataset


class TwoViews(Dataset):
    def __init__(self, shapes):
        self.shapes = shapes

    def __len__(self):
        return len(self.shapes)

    def view(self, image):
        image = image + 0.1 * torch.randn_like(image)
        return image.roll(int(torch.randint(-2, 3, ())), 2) * torch.empty(()).uniform_(0.8, 1.2)

    def __getitem__(self, index):
        image, _ = self.shapes[index]
        return self.view(image), self.view(image)


def head(inputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(200, 32))
        self.projector, self.predictor = head(32), head(16)
        self.target = copy.deepcopy(nn.Sequential(self.backbone, self.projector)).requires_grad_(False)

    def forward(self, one, two):
        online = [self.predictor(self.projector(self.backbone(view))) for view in (one, two)]
        with torch.no_grad():
            wanted = [self.target(view) for view in (two, one)]
        return sum(2 - 2 * F.cosine_similarity(p, t).mean() for p, t in zip(online, wanted, strict=True))

    @torch.no_grad()
    def update_target(self, momentum):
        online = (*self.backbone.parameters(), *self.projector.parameters())
        for mine, theirs in zip(self.target.parameters(), online, strict=True):
            mine.mul_(momentum).add_(theirs, alpha=1 - momentum)


@torch.no_grad()
def knn_accuracy(model, known, unknown):
    model.eval()
    features = [
        F.normalize(model.backbone(torch.stack([image for image, _ in shapes])), dim=1) for shapes in (known, unknown)
    ]
    labels = [torch.tensor([label for _, label in shapes]) for shapes in (known, unknown)]
    nearest = (features[1] @ features[0].t()).argmax(dim=1)
    model.train()
    return (labels[0][nearest] == labels[1]).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(1)
    loader = DataLoader(TwoViews(Shapes()), batch_size=24, shuffle=True, drop_last=True, num_workers=1)
    known, unknown = [[shapes[i] for i in range(len(shapes))] for shapes in (Shapes(), Shapes(1000, 30))]
    model = BYOL()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01)
    total, step = args.epochs * len(loader), 0
    for epoch in range(args.epochs):
        for one, two in loader:
            loss = model(one, two)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.update_target(1 - 0.05 * (math.cos(math.pi * step / total) + 1) / 2)
            step += 1
        print(f"epoch {epoch}: loss {loss.item():.4f}, knn {knn_accuracy(model, known, unknown):.3f}")
    torch.save(model.backbone.state_dict(), "backbone.pt")


if __name__ == "__main__":
    main()
