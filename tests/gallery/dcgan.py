"""Trains a generator against a discriminator as PyTorch's DCGAN example does: two optimizers, real and fake, samples on the way."""

import torch
from shapes import Shapes
from torch import nn

import undula

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


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.G, self.D = Generator().apply(weights_init), Discriminator().apply(weights_init)
        self.register_buffer("fixed_noise", torch.randn(16, NOISE, 1, 1))


def train(run):
    run.dataset(Shapes())
    torch.manual_seed(999)
    model = run.model(GAN())
    groups = [{"params": model.D.parameters()}, {"params": model.G.parameters()}]
    run.optimizer(torch.optim.Adam(groups, lr=run.base_lr, betas=(0.5, 0.999)))
    criterion = nn.BCELoss()
    for step in run.steps():
        trains_discriminator = step.index % 2 == 0
        model.D.requires_grad_(trains_discriminator)
        model.G.requires_grad_(not trains_discriminator)
        for real, _ in step.batches():
            fake = model.G(torch.randn(len(real), NOISE, 1, 1))
            if trains_discriminator:
                errD_real = criterion(model.D(real), torch.ones(len(real)))
                errD_fake = criterion(model.D(fake), torch.zeros(len(real)))
                step.log(loss_D=errD_real + errD_fake)
                step.backward(errD_real + errD_fake)
            else:
                errG = criterion(model.D(fake), torch.ones(len(real)))
                step.log(loss_G=errG)
                step.backward(errG)
        step.update()
        epoch, rest = divmod(step.index + 1, run.plan.steps_per_epoch)
        if rest == 0:
            with torch.no_grad():
                fake = model.G(model.fixed_noise)
            if run.rank == 0:
                torch.save(fake, f"fake_samples_epoch_{epoch:03d}.pt")


if __name__ == "__main__":
    undula.main(train)
