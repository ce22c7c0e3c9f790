"""Models as users have them, for the conformance suite, and their losses. Everything is at the top of the module, as ranks import it."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from undula.data.stored.rows import Batch

WIDTH = 4
WORDS = 7


def on_numbers(model: nn.Module, batch: Batch) -> Tensor:
    """Mean loss of a model of numbers, real or complex, of any type."""
    x = batch["x"]
    assert isinstance(x, Tensor)
    return model(x).abs().float().square().mean()


def on_words(model: nn.Module, batch: Batch) -> Tensor:
    """Mean loss of a model of words."""
    return model(batch["words"]).square().mean()  # type: ignore[no-any-return]


class Plain(nn.Module):
    """Two layers with a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class Unused(Plain):
    """A layer never receives a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class SometimesUsed(Plain):
    """A branch that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(WIDTH, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found = super().forward(x)
        return found + self.branch(x) if self.calls % 3 == 0 else found


class Routed(Plain):
    """Experts for the samples of a batch, a head for its task, and a layer that some batches skip."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y, task = super().forward(x), int(100 * x.abs().sum()) % 3
        expert = (100 * x[:, 0].abs()).long() % 3
        for number in expert.unique().tolist():
            rows = (expert == number).nonzero().flatten()
            y = y.index_add(0, rows, self.experts[number](y[rows]))
        return self.heads[task](y) if task < 2 else y  # type: ignore[no-any-return]


class ChannelsLast(Plain):
    """A layer whose parameters are channels-last, and a column-major buffer that the first forward pass sets."""

    directions: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(WIDTH, WIDTH, 2).to(memory_format=torch.channels_last)
        self.register_buffer("directions", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.directions is None:
            self.directions = torch.full((WIDTH, WIDTH + 1), 0.1).t()
        x = self.convolution(x[:, :, None, None].expand(-1, -1, 2, 2)).flatten(1)
        return super().forward((x @ self.directions.t())[:, :WIDTH])


class Dropping(Plain):
    """Network with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


class Frozen(Plain):
    """The first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Tied(nn.Module):
    """One matrix is both embedding and output."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 5)
        self.out = nn.Linear(5, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.words(words))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.lstm = nn.LSTM(4, 5, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.lstm(self.words(words))[0]  # type: ignore[no-any-return]


class Normed(Plain):
    """BatchNorm between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


class Repeated(Plain):
    """Repeated blocks with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.second(x)  # type: ignore[no-any-return]


class SparseWords(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 3, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.words(words)  # type: ignore[no-any-return]


class Buffers(Plain):
    """An integer buffer that counts, one that a fresh module makes again, one that is missing, and one that comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("table", torch.arange(WIDTH) / WIDTH, persistent=False)
        self.register_buffer("missing", None)
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += (x[:, :2] > 0).sum(0)
            if self.late is None:
                self.late = torch.ones(3)
        return super().forward(x + self.table) + (0 if self.late is None else self.late)


class Changing(Plain):
    """A buffer that is not persistent, and that training changes: it cannot resume exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x - self.mean)


class Counting(Plain):
    """A buffer that is not persistent, and that the forward pass does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()), persistent=False)


class Averaged(Plain):
    """A buffer with an average of the weights, which the script moves after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(5, WIDTH))


class Scaled(Plain):
    """A buffer by which the input is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Adapted(nn.Linear):
    """A frozen layer with a low-rank adapter that is merged into its weight in eval mode, as loralib's."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 5)
        self.down = nn.Parameter(torch.randn(2, WIDTH) * 0.1)
        self.up = nn.Parameter(torch.zeros(5, 2))
        self.is_merged = False
        self.weight.requires_grad_(False)

    def train(self, mode: bool = True) -> "Adapted":
        super().train(mode)
        if mode == self.is_merged:
            self.weight.data += (self.up @ self.down) * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found if self.is_merged else found + x @ self.down.T @ self.up.T


class Merged(Plain):
    """A layer that merges its adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Adapted()


class Replaced(Plain):
    """A buffer that each forward pass replaces by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return super().forward(x - self.mean)


class Empty(Plain):
    """A parameter and a buffer without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


class Complex(nn.Module):
    """Complex parameters of both sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64) @ self.weight * self.wide


class Cast(nn.Module):
    """A plain model of another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.plain = Plain().to(dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x.to(self.dtype))  # type: ignore[no-any-return]


class Parametrized(Plain):
    """Weight norm, spectral norm and an orthogonal matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(WIDTH, 5))
        self.second = parametrizations.spectral_norm(nn.Linear(5, 3))
        self.third = parametrizations.orthogonal(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(super().forward(x))  # type: ignore[no-any-return]


class Lazy(nn.Module):
    """A layer that takes its shape from the first batch."""

    def __init__(self, is_ready: bool) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(3)
        if is_ready:
            self(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class WithExtraState(Plain):
    """Extra state of numbers and a tensor, which changes with each step and changes the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.scale = torch.ones(())

    def get_extra_state(self) -> dict[str, object]:
        return {"calls": self.calls, "scale": self.scale, "kind": ("numbers", None)}

    def set_extra_state(self, state: dict[str, object]) -> None:
        calls, scale = state["calls"], state["scale"]
        assert isinstance(calls, int)
        assert isinstance(scale, Tensor)
        assert state["kind"] == ("numbers", None)
        self.calls, self.scale = calls, scale.clone()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale * self.calls


class WithOddExtraState(Plain):
    """Extra state that no checkpoint can hold."""

    def get_extra_state(self) -> object:
        return {"tools": {1, 2}}

    def set_extra_state(self, state: object) -> None:
        pass


class Unrepeatable(Plain):
    """Draws numbers that no seed determines."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(x.shape, generator=torch.Generator().manual_seed(torch.seed())))
