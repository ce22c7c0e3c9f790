"""Models of many kinds, as train functions with a dataset of their own, whose memory is counted."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from undula.train.run import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
from gpt import GPT, VOCABULARY, GPTConfig
from resnet import ResNet18, ResNetConfig

WORDS, LENGTH, PIXELS, CLASSES = 512, 48, 32, 10


class Texts(Dataset[Tensor]):
    """Sentences of random words; shape [LENGTH]."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))


class Images(Dataset[tuple[Tensor, int]]):
    """Random images with their classes; shape [3, PIXELS, PIXELS]."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(index)), index % CLASSES


@dataclass(frozen=True)
class Trained:
    """Train function of a model."""

    make_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    data: Callable[[], Dataset[object]] = Texts  # type: ignore[assignment]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(model.parameters())
    is_real: bool = False
    """Whether real passes are counted, because the script needs values or a layer has no fake results of the right size."""

    def __call__(self, run: Run) -> None:
        run.dataset(self.data())  # type: ignore[arg-type]
        model = run.model(self.make_model())
        run.optimizer(self.make_optimizer(model))
        for step in run.steps():
            for batch in step.batches():
                loss = self.loss(model, batch)
                step.backward(loss)
                step.log(seen=loss.detach())
            step.update()


def next_word(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, classes = batch
    return F.cross_entropy(model(images), classes)


def rebuilt(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[0])


class Recurrent(nn.Module):
    """Language model with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, 64), nn.LSTM(64, 96, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(96, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.words(words))[0])  # type: ignore[no-any-return]


class Block(nn.Module):
    """Block of a transformer."""

    def __init__(self, width: int = 64, make_mlp: Callable[[int], nn.Module] | None = None):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
        self.mlp = make_mlp(width) if make_mlp else mlp

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mixed(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.mlp(self.between(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Language model of blocks, whose head has the weights of the embedding."""

    def __init__(self, make_mlp: Callable[[int], nn.Module] | None = None, width: int = 64):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(*(Block(width, make_mlp) for _ in range(4)))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(words)))  # type: ignore[no-any-return]


class OddBlock(nn.Module):
    """Block without attention, whose tensors have odd numbers of rows."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(torch.ones(1, width))
        self.wide, self.narrow = nn.Linear(width, 4 * width + 1), nn.Linear(4 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.narrow(F.gelu(self.wide(self.norm(x))))  # type: ignore[no-any-return]


class Odd(nn.Module):
    """Language model of odd sizes, whose head has the weights of the embedding, with a buffer and a frozen layer."""

    def __init__(self, width: int = 151):
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, width)
        self.register_buffer("places", torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(OddBlock(width) for _ in range(3))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, WORDS + 1, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Mixture of experts, each of which computes the words that are routed to it."""

    def __init__(self, width: int):
        super().__init__()
        self.route = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.route(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero().flatten()
            result = result.index_add(0, places, (expert(flat[places]) * weight[places, None]).to(result.dtype))
        return result.view_as(x)


class UNet(nn.Module):
    """Network that makes images smaller and larger again, with connections between both."""

    def __init__(self, width: int = 16):
        super().__init__()
        sizes = (width, 2 * width, 4 * width)
        self.first = _convolved(3, width)
        self.down = nn.ModuleList(_convolved(one, other) for one, other in pairwise(sizes))
        self.up = nn.ModuleList(_convolved(one + other, one) for one, other in pairwise(sizes))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        levels = [self.first(images)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up in reversed(self.up):
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), levels.pop()], 1))
        return self.last(x)  # type: ignore[no-any-return]


def _convolved(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())


def convolutional() -> nn.Module:
    return nn.Sequential(
        _convolved(3, 32),
        nn.MaxPool2d(2),
        _convolved(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


class HuggingFaces(nn.Module):
    """Decoder of transformers, which may also return the keys and values that it would need to generate text."""

    def __init__(self, use_cache: bool, dropout: float = 0.0):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        # A count leaves the dropout of attention out, because the kernels of GPUs need no memory for it. Those of the CPU do.
        sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 64, "n_layer": 3, "n_head": 4}
        config = GPT2Config(**sizes, use_cache=use_cache, attn_pdrop=dropout)
        self.model = GPT2LMHeadModel(config)

    def forward(self, words: Tensor) -> Tensor:
        return self.model(input_ids=words).logits  # type: ignore[no-any-return]


class Masked(nn.Module):
    """Classifier that looks only at pixels above a limit, whose number depends on their values."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(3, 64), nn.Linear(64, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.flatten(2).transpose(1, 2)
        return torch.stack([self.head(F.relu(self.features(each[each[:, 0] > 0]))).mean(0) for each in pixels])


class VisionTransformer(nn.Module):
    """Classifier of patches of an image."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks, self.head = nn.Sequential(Block(width), Block(width)), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.blocks(patches).mean(1))  # type: ignore[no-any-return]


def next_byte(model: nn.Module, words: Tensor) -> Tensor:
    return next_word(model, words % VOCABULARY)


MODELS: dict[str, Trained] = {
    "the GPT of the main job": Trained(lambda: GPT(GPTConfig(layers=2, width=64, context=LENGTH)), next_byte),  # type: ignore[arg-type]
    "the ResNet of the other job": Trained(
        lambda: ResNet18(ResNetConfig(channels=3, classes=CLASSES, width=8)),
        classified,
        Images,  # type: ignore[arg-type]
    ),
    "a vision transformer": Trained(VisionTransformer, classified, Images),  # type: ignore[arg-type]
    "a perceptron": Trained(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * PIXELS**2, 256), nn.ReLU(), nn.Linear(256, CLASSES)),
        classified,
        Images,  # type: ignore[arg-type]
    ),
    "a convolutional network with BatchNorm": Trained(convolutional, classified, Images),  # type: ignore[arg-type]
    "a U-Net": Trained(UNet, rebuilt, Images),  # type: ignore[arg-type]
    "an LSTM": Trained(Recurrent, next_word, is_real=True),  # type: ignore[arg-type]
    "a decoder with tied weights": Trained(Decoder, next_word),  # type: ignore[arg-type]
    "a mixture of experts": Trained(lambda: Decoder(Experts), next_word, is_real=True),  # type: ignore[arg-type]
    "Hugging Face's decoder": Trained(lambda: HuggingFaces(False), next_word),  # type: ignore[arg-type]
    "Hugging Face's decoder with a cache": Trained(lambda: HuggingFaces(True), next_word),  # type: ignore[arg-type]
    "masked pixels": Trained(Masked, classified, Images, is_real=True),  # type: ignore[arg-type]
}
SHARDED: dict[str, Trained] = {
    "a wide GPT": Trained(lambda: GPT(GPTConfig(layers=3, width=192, context=LENGTH)), next_byte),  # type: ignore[arg-type]
    "a tied model of odd sizes": Trained(Odd, next_word),  # type: ignore[arg-type]
}
"""Models whose parameters take more memory than the activations of a sample."""
