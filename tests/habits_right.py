"""Habits of torch scripts with which a run ends as the plain loop does."""

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from habits import Habit
from numbers_job import network
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations
from torch.nn.utils.stateless import functional_call
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

RIGHT: dict[str, type[Habit]] = {}
"""Habit by the name of its row in the table."""


def right(row: str) -> Callable[[type[Habit]], type[Habit]]:
    def add(habit: type[Habit]) -> type[Habit]:
        RIGHT[row] = habit
        return habit

    return add


@right("`optimizer.zero_grad()` before `step.backward(loss)`")
class Zeroes(Habit):
    def before_backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()


@right("`model.zero_grad()`, `p.grad = None` of all parameters, before `step.backward(loss)`")
class ZeroesModel(Habit):
    def loss(self, x: Tensor) -> Tensor:
        self.model.zero_grad()
        return super().loss(x)

    def before_backward(self, loss: Tensor) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


@right("`zero_grad(set_to_none=False)` before `step.backward(loss)`")
class ZeroesInPlace(Habit):
    def before_backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=False)


@right("`model.to(device)`, `model.float()` in a batch, without effect")
class Converts(Zeroes):
    def before_backward(self, loss: Tensor) -> None:
        super().before_backward(loss)
        self.model.float().to("cpu")


@right("`loss.backward()` between two steps")
class Probes(Zeroes):
    def after_update(self) -> None:
        self.model(torch.ones(1, 1)).sum().backward()


@right("`torch.autograd.grad`, also of second order")
class Penalizes(Habit):
    def loss(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.model(x).sum(), x, create_graph=True)
        return super().loss(x) + 0.1 * slope.square().mean()


@right("several losses, added")
class Adds(Habit):
    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) + 0.1 * self.model(1 - x).abs().mean()


@right("`loss += ...` after `step.backward(loss)`")
class ChangesLoss(Habit):
    def after_backward(self, loss: Tensor) -> None:
        with torch.no_grad():
            loss.mul_(0)

    def after_update(self) -> None:
        assert self.step is None or (self.step.loss or 0) > 0


@right("`clip_grad_norm_`, `clip_grad_value_` after `step.reduce()`")
class ClipsReduced(Habit):
    def reduced(self) -> None:
        clip_grad_norm_(self.model.parameters(), 0.5)
        clip_grad_value_(self.model.parameters(), 0.1)


@right("`p.grad.mul_()`, `p.grad = None` after `step.reduce()`")
class ChangesReduced(Habit):
    def reduced(self) -> None:
        self.model[0].weight.grad = None
        self.model[2].weight.grad.mul_(0.5)


@right("`p.register_hook`")
class HooksGradients(Habit):
    def begin(self) -> None:
        self.model[0].weight.register_hook(lambda gradient: gradient * 0.5)


@right("`register_full_backward_hook`, `register_forward_hook`")
class HooksModules(Habit):
    def begin(self) -> None:
        self.model[1].register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))
        self.model[1].register_forward_hook(lambda module, inputs, output: output * 2)


@right("parameters frozen and unfrozen between steps")
class Freezes(Habit):
    def before_step(self) -> None:
        self.model[0].requires_grad_(self.number % 2 == 1)


@right("`optimizer.state[p]` changed after `step.update()`")
class Halves(Habit):
    def after_update(self) -> None:
        for entries in self.optimizer.state.values():
            entries["momentum_buffer"].mul_(0.5)


@right("`optimizer.add_param_group`")
class AddsGroup(Habit):
    def optimize(self, model: Any) -> torch.optim.Optimizer:
        model[0].requires_grad_(False)
        return torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)

    def before_step(self) -> None:
        if self.number >= 3:
            self.model[0].requires_grad_()
        if self.number == 3:
            self.optimizer.add_param_group({"params": self.model[0].parameters(), "lr": 0.05})


class Pair(nn.Module):
    """Two networks that are trained against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = network(), network()


@right("a GAN as one model, with a parameter group for each part")
class Adversaries(Habit):
    def make(self) -> nn.Module:
        return Pair()

    def optimize(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            [{"params": model.maker.parameters()}, {"params": model.judge.parameters(), "lr": 0.1}], lr=0.1
        )

    def before_step(self) -> None:
        self.model.maker.requires_grad_(self.number % 2 == 0)
        self.model.judge.requires_grad_(self.number % 2 == 1)

    def loss(self, x: Tensor) -> Tensor:
        made = self.model.judge(self.model.maker(x)).mean()
        return made if self.number % 2 == 0 else self.model.judge(x).square().mean() - 0.1 * made


@right("`scheduler` given to `run.optimizer()`")
class Scheduled(Habit):
    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))


@right("tied weights")
class Ties(Habit):
    def make(self) -> nn.Module:
        module: Any = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
        with torch.no_grad():
            module[0].weight.fill_(0.3)
            module[0].bias.fill_(0.1)
            module[2].bias.fill_(0.2)
        module[2].weight = module[0].weight
        return module


@right("`weight_norm` and other parametrizations")
class Parametrizes(Habit):
    def make(self) -> nn.Module:
        module: Any = network()
        parametrizations.weight_norm(module[0])
        return module


@right("`spectral_norm`")
class Normalizes(Habit):
    def make(self) -> nn.Module:
        module: Any = network()
        parametrizations.spectral_norm(module[2])
        return module


class Averaging(nn.Module):
    """Network with an average of its weights in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        for number, parameter in enumerate(self.network.parameters()):
            self.register_buffer(f"mean_{number}", parameter.detach().clone())

    def forward(self, x: Tensor) -> Any:
        return self.network(x)


@right("an average of the weights (EMA) in buffers, moved after `step.update()`")
class AveragesInBuffers(Habit):
    def make(self) -> nn.Module:
        return Averaging()

    def after_update(self) -> None:
        for number, parameter in enumerate(self.model.network.parameters()):
            self.model.get_buffer(f"mean_{number}").lerp_(parameter.detach(), 0.1)


class WithAverage(nn.Module):
    """Network with an `AveragedModel` of it as another part."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.average = AveragedModel(self.network, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def forward(self, x: Tensor) -> Any:
        return self.network(x)


@right("`AveragedModel` as a part of the model")
class AveragesModel(Habit):
    def make(self) -> nn.Module:
        return WithAverage()

    def optimize(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.network.parameters(), lr=0.1, momentum=0.9)

    def after_update(self) -> None:
        self.model.average.update_parameters(self.model.network)


@right("a second copy of the weights as a part of the model, moved by `p.data.mul_().add_()`")
class AveragesInParameters(AveragesModel):
    def after_update(self) -> None:
        for mean, parameter in zip(self.model.average.parameters(), self.model.network.parameters(), strict=True):
            mean.data.mul_(0.9).add_(parameter.data, alpha=0.1)


@right("`p.data = ...` of a part of the model after `step.update()`")
class AveragesByAssignment(AveragesModel):
    def after_update(self) -> None:
        for mean, parameter in zip(self.model.average.parameters(), self.model.network.parameters(), strict=True):
            mean.data = 0.9 * mean.data + 0.1 * parameter.data


@right("averages that are swapped in for an evaluation after `step.update()`, and out again")
class SwapsAverages(AveragesInParameters):
    def after_update(self) -> None:
        super().after_update()
        kept = {name: value.clone() for name, value in self.model.network.state_dict().items()}
        self.model.network.load_state_dict(self.model.average.module.state_dict())
        with torch.no_grad():
            self.model(torch.ones(1, 1))
        self.model.network.load_state_dict(kept)


class WithViews(nn.Module):
    """Network with buffers that are views to which torch cannot write."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        turned = torch.polar(torch.ones(4), torch.arange(4.0)).conj()
        for name, view in {"mask": torch.ones(7).expand(1, 7), "many": torch.ones(1).expand(3), "turn": turned}.items():
            self.register_buffer(name, view, persistent=False)
        self.register_buffer("sine", turned.imag, persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.network(x) * self.mask.mean() + self.many.mean() + self.turn.real.mean() - self.sine.mean()


@right("`register_buffer` of a tensor made by `expand`, `conj` or `imag`")
class BuffersOfViews(Habit):
    def make(self) -> nn.Module:
        return WithViews()


class Counting(nn.Module):
    """Network that counts its samples and its steps, and notes which samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.register_buffer("residues", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(48, dtype=torch.bool))

    def forward(self, x: Tensor) -> Any:
        places = (48 * x).round().long().flatten()
        self.residues += torch.bincount(places % 4, minlength=4)
        self.steps += 1
        self.seen[places] = True
        return self.network(x)


@right("counts and flags in integer and Boolean buffers, changed in the forward pass")
class Counts(Habit):
    def make(self) -> nn.Module:
        return Counting()


@right("`torch.compile(model)`")
class CompilesModel(Habit):
    def make(self) -> nn.Module:
        return nn.Sequential(torch.compile(network()[0], backend="eager"), *network()[1:])

    def begin(self) -> None:
        self.compiled = torch.compile(self.model, backend="eager")

    def loss(self, x: Tensor) -> Tensor:
        return (self.compiled(x) - torch.sin(6 * x)).square().mean()  # type: ignore[no-any-return]


@right("`torch.compile(function)`, `torch.func.functional_call`")
class CompilesFunction(Habit):
    def begin(self) -> None:
        self.function = torch.compile(lambda y, x: (y - torch.sin(6 * x)).square().mean(), backend="eager")

    def loss(self, x: Tensor) -> Tensor:
        y = functional_call(self.model, dict(self.model.named_parameters()), x)
        return self.function(y, x)  # type: ignore[no-any-return]


@right("`torch.autocast` around the forward pass")
class Autocasts(Habit):
    tolerance = 0.02  # bf16 has 8 bits, and gradients are rounded for each virtual worker

    def loss(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.model(x)
        return (y.float() - torch.sin(6 * x)).square().mean()


@right("`checkpoint(function, ...)` of activations")
class Recomputes(Habit):
    def loss(self, x: Tensor) -> Tensor:
        y = checkpoint(self.model, x, use_reentrant=False)
        return (y - torch.sin(6 * x)).square().mean()


@right("`torch.autograd.detect_anomaly()`")
class Detects(Habit):
    def loss(self, x: Tensor) -> Tensor:
        with torch.autograd.set_detect_anomaly(True):
            return super().loss(x)


@right("`model.eval()` left on")
class StaysInEval(Habit):
    def make(self) -> nn.Module:
        return nn.Sequential(nn.Dropout(), *network())

    def after_update(self) -> None:
        self.model.eval()

    def before_step(self) -> None:
        self.model.eval()


@right("`torch.manual_seed` in the loop")
class Seeds(Habit):
    def loss(self, x: Tensor) -> Tensor:
        torch.manual_seed(self.number)
        return super().loss(x * torch.rand(1))


@right("`loss.item()`, `print(loss)`")
class Reads(Habit):
    def after_backward(self, loss: Tensor) -> None:
        assert loss.item() > 0
        assert "tensor" in repr(loss)


@right("`p.grad.norm()` before `step.update()`")
class ReadsGradients(Habit):
    """The norm is that of this rank's virtual workers."""

    def before_update(self) -> None:
        assert sum(float(each.grad.data.norm()) for each in self.model.parameters()) > 0
        assert type(self.model[0].weight.grad * 2) is Tensor


@right("`torch.save(model.state_dict())`")
class Saves(Habit):
    def after_update(self) -> None:
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        torch.save(self.model, file)


@right("`load_state_dict` of the model and the optimizer between steps")
class Loads(Habit):
    def after_update(self) -> None:
        if self.number == 2:
            self.model.load_state_dict(network().state_dict())
            state = self.optimizer.state_dict()
            self.optimizer.load_state_dict({**state, "state": {}})


@right("an evaluation with `torch.no_grad()` in the loop, with a `DataLoader` of its own")
class Evaluates(Habit):
    def after_update(self) -> None:
        self.model.eval()
        with torch.no_grad():
            for (x,) in DataLoader(TensorDataset(torch.rand(8, 1)), batch_size=4, shuffle=True):
                self.model(x)
        self.model.train()


@right("an optimizer for inputs, made anew for each batch")
class Attacks(Habit):
    def loss(self, x: Tensor) -> Tensor:
        delta = torch.zeros_like(x, requires_grad=True)
        optimizer = torch.optim.SGD([delta], lr=0.01)
        (gradient,) = torch.autograd.grad(-super().loss(x + delta), [delta])
        delta.grad = gradient.sign()
        optimizer.step()
        return super().loss(x + delta.detach())


@right("`torch.distributed` between two steps")
class Talks(Habit):
    def after_update(self) -> None:
        if dist.is_initialized():
            value = torch.ones(1)
            dist.all_reduce(value)
            assert value == dist.get_world_size()
