"""Models and optimizers as users have them, for the conformance suite. Everything is at module level, so that ranks can import it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from undula.data.rows import Batch
from undula.testing.conformance import Training

ROWS = 12
WIDTH = 4
WORDS = 7


def batches(count: int = 4) -> list[Batch]:
    """Numbers and words of shape [samples, WIDTH]."""
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randn(ROWS, WIDTH, generator=generator),
            "words": torch.randint(WORDS, (ROWS, WIDTH), generator=generator),
        }
        for _ in range(count)
    ]


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


class SparseWords(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 3, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.words(words)  # type: ignore[no-any-return]


class Buffers(Plain):
    """An integer buffer that counts, a buffer that is not persistent, one that stays None, and one that is set in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("table", torch.arange(WIDTH) / WIDTH, persistent=False)
        self.register_buffer("missing", None)
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            if self.late is None:
                self.late = torch.ones(3)
        return super().forward(x + self.table) + self.late


class Changing(Plain):
    """A buffer that is not persistent but changes during training, so that the run cannot resume exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x - self.mean)


class Replaced(Plain):
    """A buffer that each forward pass replaces with another tensor."""

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
    """A plain model with another dtype."""

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
    """Extra state of numbers and a tensor that affect the forward pass."""

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
        self.calls += 1
        self.scale = self.scale * 0.9
        return super().forward(x) * self.scale * self.calls


class WithOddExtraState(Plain):
    """Extra state that no checkpoint can hold."""

    def get_extra_state(self) -> object:
        return {"tools": {1, 2}}

    def set_extra_state(self, state: object) -> None:
        pass


def compiled() -> nn.Module:
    """A compiled model."""
    return torch.compile(Plain(), backend="eager")  # type: ignore[return-value]


def freeze_and_unfreeze(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The first layer is frozen in step 0 and from step 2 on."""
    model.first.requires_grad_(step == 1)  # type: ignore[union-attr]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer for cases about models."""
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer without state."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


MODELS: dict[str, Training] = {
    "plain": Training(Plain, adamw, on_numbers),
    "an unused layer": Training(Unused, adamw, on_numbers),
    "a branch that some steps use": Training(SometimesUsed, adamw, on_numbers),
    "a frozen layer": Training(Frozen, adamw, on_numbers),
    "tied weights": Training(Tied, adamw, on_words),
    "an LSTM with dropout": Training(Recurrent, adamw, on_words),
    "BatchNorm": Training(Normed, adamw, on_numbers),
    "a sparse embedding": Training(SparseWords, sgd, on_words),
    "buffers of all kinds": Training(Buffers, adamw, on_numbers),
    "a buffer that is replaced": Training(Replaced, adamw, on_numbers),
    "tensors without elements": Training(Empty, adamw, on_numbers),
    "complex parameters": Training(Complex, adamw, on_numbers),
    "double parameters": Training(partial(Cast, torch.float64), adamw, on_numbers),
    "bf16 parameters": Training(partial(Cast, torch.bfloat16), adamw, on_numbers),
    "parametrizations": Training(Parametrized, adamw, on_numbers),
    "a lazy layer that has seen a batch": Training(partial(Lazy, True), adamw, on_numbers),
    "extra state": Training(WithExtraState, adamw, on_numbers),
    "a compiled model": Training(compiled, adamw, on_numbers),
    "a layer that is frozen and unfrozen": Training(Plain, adamw, on_numbers, freeze_and_unfreeze),
}

REFUSED: dict[str, tuple[Training, str]] = {
    "a lazy layer": (
        Training(partial(Lazy, False), adamw, on_numbers),
        r"model\.layer\.weight has no shape yet: pass one batch through",
    ),
    "odd extra state": (
        Training(WithOddExtraState, adamw, on_numbers),
        r"model\._extra_state\.tools is a builtins\.set, which no checkpoint can hold",
    ),
    "LBFGS": (
        Training(Plain, lambda model: torch.optim.LBFGS(model.parameters()), on_numbers),
        "LBFGS needs a closure that runs the model several times in one step",
    ),
    "momentum of sparse gradients": (
        Training(SparseWords, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), on_words),
        r"optimizer\.state\.words\.weight\.momentum_buffer is a sparse_coo tensor, which no checkpoint can hold",
    ),
}
"""Training runs that are refused, with the beginning of the message."""


@dataclass(frozen=True)
class Made:
    """Function that makes an optimizer of a class for all parameters."""

    of: type[torch.optim.Optimizer]
    settings: tuple[tuple[str, object], ...] = ()

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.of(model.parameters(), **{"lr": 0.01, **dict(self.settings)})  # type: ignore[arg-type]


def made(of: type[torch.optim.Optimizer], **settings: object) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Make an optimizer of a class, with settings other than its defaults."""
    return Made(of, tuple(settings.items()))


def several_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Groups with their own settings, one of which is empty."""
    weights = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "betas": (0.8, 0.9)}, {"params": []}]
    return torch.optim.AdamW(groups, lr=0.05)


def with_tensor_rate(model: nn.Module) -> torch.optim.Optimizer:
    """A learning rate that is a tensor."""
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05))


def first_layer(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of only the first layer."""
    return torch.optim.AdamW(model.first.parameters(), lr=0.05)  # type: ignore[union-attr]


def add_second_layer(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Add a group before step 2."""
    if step >= 2 and len(optimizer.param_groups) == 1:
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.02})  # type: ignore[union-attr]


def matrices(model: nn.Module) -> torch.optim.Optimizer:
    """Muon only accepts matrices."""
    return torch.optim.Muon([each for each in model.parameters() if each.dim() == 2], lr=0.05)


def late_momentum(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Momentum and its state start in step 2."""
    optimizer.param_groups[0]["momentum"] = 0.9 if step >= 2 else 0.0


def train_mode(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A schedule-free optimizer has different weights for training and for validation."""
    optimizer.train()  # type: ignore[attr-defined]


TORCH: dict[str, Training] = {
    **{
        of.__name__: Training(Plain, made(of), on_numbers)
        for of in (
            *(torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax),
            *(torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop),
            *(torch.optim.Rprop, torch.optim.SGD),
        )
    },
    "Muon": Training(Plain, matrices, on_numbers),
    "SparseAdam": Training(SparseWords, made(torch.optim.SparseAdam), on_words),
    "Adagrad of sparse gradients": Training(SparseWords, made(torch.optim.Adagrad), on_words),
    "SGD with momentum": Training(Plain, made(torch.optim.SGD, momentum=0.9), on_numbers),
    "SGD with momentum from step 2 on": Training(Plain, sgd, on_numbers, late_momentum),
    "Adam with amsgrad": Training(Plain, made(torch.optim.Adam, amsgrad=True), on_numbers),
    "Adam, fused": Training(Plain, made(torch.optim.Adam, fused=True), on_numbers),
    "Adam, one parameter at a time": Training(Plain, made(torch.optim.Adam, foreach=False), on_numbers),
    "RMSprop, centered": Training(Plain, made(torch.optim.RMSprop, centered=True, momentum=0.9), on_numbers),
    "several groups": Training(Plain, several_groups, on_numbers),
    "a learning rate that is a tensor": Training(Plain, with_tensor_rate, on_numbers),
    "a group added during training": Training(Plain, first_layer, on_numbers, add_second_layer),
}
"""Optimizers of torch."""

OTHERS: dict[str, Training] = {
    **{
        name: Training(Plain, made(pytorch_optimizer.load_optimizer(name)), on_numbers)
        for name in (
            *("lion", "adabelief", "adan", "came", "lamb", "lars", "madgrad", "prodigy", "dadaptadam", "adopt", "soap"),
            *("asgd", "tiger", "stablespam", "emonavi", "ademamix", "grams", "splus", "kron", "spam", "adafactor"),
        )
    },
    "schedule-free AdamW": Training(
        Plain, made(pytorch_optimizer.ScheduleFreeAdamW, warmup_steps=2), on_numbers, train_mode
    ),
    "schedule-free SGD": Training(Plain, made(pytorch_optimizer.ScheduleFreeSGD), on_numbers, train_mode),
    "schedule-free RAdam": Training(Plain, made(pytorch_optimizer.ScheduleFreeRAdam), on_numbers, train_mode),
    "Ranger21": Training(
        Plain, made(pytorch_optimizer.Ranger21, num_iterations=20, num_warm_up_iterations=2), on_numbers
    ),
}
"""Optimizers of pytorch-optimizer."""

ALL: dict[str, Training] = {**MODELS, **TORCH, **OTHERS}
