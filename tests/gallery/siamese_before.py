"""Trains a siamese network as PyTorch's example does: pairs of images, binary cross-entropy, random augmentation of each image."""

import argparse

import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, shapes):
        self.shapes = shapes

    def __len__(self):
        return len(self.shapes)

    def __getitem__(self, index):
        first, label = self.shapes[index]
        other = int(torch.randint(len(self.shapes), ()))
        second, other_label = self.shapes[other]
        second = torch.flip(second, (2,)) if torch.rand(()) < 0.5 else second
        return first, second, torch.tensor(float(label == other_label))


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 16)
        )
        self.fc = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, first, second):
        return self.fc(torch.cat((self.features(first), self.features(second)), 1)).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(1)
    loader = DataLoader(Pairs(Shapes()), batch_size=16, shuffle=True, num_workers=1)
    model = SiameseNetwork()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for epoch in range(args.epochs):
        model.train()
        for first, second, is_same in loader:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy(model(first, second), is_same)
            loss.backward()
            optimizer.step()
        print(f"Epoch: {epoch} Loss: {loss.item():.4f}")


if __name__ == "__main__":
    main()
