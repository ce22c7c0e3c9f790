"""Trains a generator against a discriminator as PyTorch's DCGAN example does: two optimizers, real and fake, samples on the way."""

import argparse

import torch
from shapes import Shapes
from torch import nn
from torch.utils.data import DataLoader

NOISE = 8


def weights_init(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 16, 3, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 3, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, images):
        return self.main(images).flatten()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(999)
    dataloader = DataLoader(Shapes(), batch_size=16, shuffle=True)
    netG, netD = Generator().apply(weights_init), Discriminator().apply(weights_init)
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(16, NOISE, 1, 1)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for epoch in range(args.epochs):
        for i, (real, _) in enumerate(dataloader):
            netD.zero_grad()
            output = netD(real)
            errD_real = criterion(output, torch.ones(len(real)))
            errD_real.backward()
            noise = torch.randn(len(real), NOISE, 1, 1)
            fake = netG(noise)
            errD_fake = criterion(netD(fake.detach()), torch.zeros(len(real)))
            errD_fake.backward()
            optimizerD.step()

            netG.zero_grad()
            errG = criterion(netD(fake), torch.ones(len(real)))
            errG.backward()
            optimizerG.step()
            print(
                f"[{epoch}/{args.epochs}][{i}/{len(dataloader)}] "
                f"Loss_D: {(errD_real + errD_fake).item():.4f} Loss_G: {errG.item():.4f}"
            )
        with torch.no_grad():
            torch.save(netG(fixed_noise), f"fake_samples_epoch_{epoch:03d}.pt")
        torch.save(netG.state_dict(), f"netG_epoch_{epoch}.pt")
        torch.save(netD.state_dict(), f"netD_epoch_{epoch}.pt")


if __name__ == "__main__":
    main()
