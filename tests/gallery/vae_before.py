"""Trains a variational autoencoder as PyTorch's example does: its forward pass draws random numbers."""

import argparse

import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn
from torch.utils.data import DataLoader


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.mean, self.log_variance = nn.Linear(144, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 144))

    def forward(self, x):
        hidden = F.relu(self.encoder(x.flatten(1)))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        sample = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(sample), mean, log_variance


def loss_function(image, output, mean, log_variance):
    divergence = -0.5 * torch.mean(torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp(), dim=1))
    return F.mse_loss(output, image.flatten(1)) + 0.01 * divergence


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(1)
    loader = DataLoader(Shapes(), batch_size=16, shuffle=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for image, _ in loader:
            optimizer.zero_grad()
            loss = loss_function(image, *model(image))
            loss.backward()
            total += loss.item()
            optimizer.step()
        print(f"====> Epoch: {epoch} Average loss: {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
