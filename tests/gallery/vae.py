"""Trains a variational autoencoder as PyTorch's example does: its forward pass draws random numbers."""

import torch
import torch.nn.functional as F
from shapes import Shapes
from torch import nn

import undula


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


def train(run):
    run.dataset(Shapes())
    torch.manual_seed(1)
    model = run.model(VAE())
    run.optimizer(torch.optim.Adam(model.parameters(), lr=run.base_lr))
    for step in run.steps():
        for image, _ in step.batches():
            step.backward(loss_function(image, *model(image)))
        step.update()


if __name__ == "__main__":
    undula.main(train)
