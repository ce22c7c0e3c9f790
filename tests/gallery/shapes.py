"""Small data sets that are made in the blink of an eye, for the scripts of the gallery."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the angry bear " * 40


class Shapes(Dataset[tuple[Tensor, int]]):
    """Noisy images of shape [1, 12, 12] with a bright bar: vertical, horizontal or diagonal."""

    def __init__(self, first: int = 0, rows: int = 96):
        self.first, self.rows = first, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        image, label = 0.3 * torch.randn(1, 12, 12, generator=generator), index % 3
        place = int(torch.randint(12, (), generator=generator))
        if label == 2:
            image[0] += torch.eye(12)
        else:
            image[0].transpose(0, label)[place] += 1.0
        return image, label
