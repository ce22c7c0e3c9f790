"""Trains a siamese network as PyTorch's example does: pairs of images, binary cross-entropy, random augmentation of each image."""

import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn
from torch.utils.data import Dataset

import undula


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


def train(run):
    run.dataset(Pairs(Shapes()), num_workers=1)
    torch.manual_seed(1)
    model = run.model(SiameseNetwork())
    run.optimizer(torch.optim.Adadelta(model.parameters(), lr=run.base_lr))
    for step in run.steps():
        for first, second, is_same in step.batches():
            step.backward(F.binary_cross_entropy(model(first, second), is_same))
        step.update()


if __name__ == "__main__":
    undula.main(train)
