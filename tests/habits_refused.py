"""Habits of torch scripts that a run refuses, with what the sentence of the refusal names."""

from typing import Any

import torch
import torch.distributed as dist
from habits import Habit
from numbers_job import network
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

REFUSED: dict[str, tuple[type[Habit], str]] = {}
"""Habit and a part of the sentence, by the name of the habit's row in the table."""


def refused(row: str, names: str) -> Any:
    def add(habit: type[Habit]) -> type[Habit]:
        REFUSED[row] = habit, names
        return habit

    return add


@refused("`zero_grad()` after `step.backward(loss)`", "zero_grad() was called after step.backward()")
class ZeroesAfter(Habit):
    def after_backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()


@refused("`zero_grad()` before `step.update()`", "zero_grad() was called after step.backward()")
class ZeroesBeforeUpdate(Habit):
    def before_update(self) -> None:
        self.model.zero_grad()


@refused("`zero_grad(set_to_none=False)` after `step.backward(loss)`", "zero_grad(set_to_none=False) deleted")
class ZeroesInPlace(Habit):
    def after_backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=False)


@refused("`p.grad.zero_()`", "zero_() changed a gradient of an open step")
class ZeroesByHand(Habit):
    def after_backward(self, loss: Tensor) -> None:
        for parameter in self.model.parameters():
            parameter.grad.zero_()


@refused("parameters frozen or unfrozen in a batch", "requires_grad of a parameter")
class FreezesInBatch(Habit):
    def loss(self, x: Tensor) -> Tensor:
        self.model[0].requires_grad_(False)
        return super().loss(x)


@refused("`loss.backward()` of another loss in a batch", "loss.backward() was called in step 0")
class Auxiliary(Habit):
    def before_backward(self, loss: Tensor) -> None:
        self.model(torch.ones(1, 1)).sum().backward()


@refused("`loss.backward()` before the batches", "a backward() of the script left a gradient of '0.weight' before")
class Penalty(Habit):
    def before_step(self) -> None:
        sum(each.square().sum() for each in self.model.parameters()).backward()  # type: ignore[union-attr]


@refused("two calls of `step.backward()` in a batch", "was called twice for a batch of step 0; add up the losses")
class BackwardTwice(Habit):
    def before_backward(self, loss: Tensor) -> None:
        assert self.step is not None
        self.step.backward(loss, share=None)


@refused("`scaler.scale(loss).backward()`", "loss.backward() was called in step 0")
class Scales(Habit):
    def before_backward(self, loss: Tensor) -> None:
        torch.amp.GradScaler("cpu").scale(loss).backward(retain_graph=True)


@refused("`scaler.unscale_(optimizer)`, `scaler.step(optimizer)`", "unscale_() changed a gradient of an open step")
class Unscales(Habit):
    def before_update(self) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)


@refused("`clip_grad_norm_` before `step.update()`", "clip_grad_norm_() changed a gradient of an open step")
class Clips(Habit):
    def before_update(self) -> None:
        clip_grad_norm_(self.model.parameters(), 0.1)


@refused("`clip_grad_value_` before `step.update()`", "clip_grad_value_() changed a gradient of an open step")
class ClipsValues(Habit):
    def after_backward(self, loss: Tensor) -> None:
        clip_grad_value_(self.model.parameters(), 100.0)


@refused("`p.grad.mul_()`, gradient noise, before `step.update()`", "add_() changed a gradient of an open step")
class Noisy(Habit):
    def before_update(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad.add_(torch.randn_like(parameter))


@refused("`p.grad.data.clamp_()` before `step.update()`", "clamp_() changed a gradient of an open step")
class ClampsData(Habit):
    def before_update(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad.data.clamp_(-1, 1)


@refused("`p.grad = None` of some parameters before `step.update()`", "the script set the gradient of '0.weight'")
class Cancels(Habit):
    def before_update(self) -> None:
        self.model[0].weight.grad = None


@refused("`register_post_accumulate_grad_hook`", "hook of register_post_accumulate_grad_hook()")
class Accumulates(Habit):
    def begin(self) -> None:
        self.model[0].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))


@refused("`optimizer.step()` in the script", "optimizer.step() of SGD was called by the script in step 0")
class StepsItself(Habit):
    def after_update(self) -> None:
        self.optimizer.step()


@refused(
    "an optimizer of its own for a part of the model", "optimizer.step() of Adam was called by the script in step 0"
)
class TwoOptimizers(Habit):
    def begin(self) -> None:
        self.other = torch.optim.Adam(self.model[2].parameters())

    def before_update(self) -> None:
        self.other.step()


@refused(
    "a discriminator or probe with an optimizer of its own, outside of the model", "was called in steps 0 and 1, but"
)
class Adversary(Habit):
    def begin(self) -> None:
        self.judge = nn.Linear(1, 1)
        self.other = torch.optim.Adam(self.judge.parameters())

    def before_backward(self, loss: Tensor) -> None:
        self.judge(loss.detach()[None]).sum().backward()
        self.other.step()
        self.other.zero_grad()


@refused("`scheduler.step()` of a scheduler that `run.optimizer()` got", "scheduler.step() was called by the script")
class StepsScheduler(Habit):
    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        self.scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return self.scheduler

    def after_update(self) -> None:
        self.scheduler.step()


@refused("`scheduler.step()` of another scheduler", "the script changed the learning rate of parameter group 0")
class OwnScheduler(Habit):
    def begin(self) -> None:
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def after_update(self) -> None:
        self.scheduler.step()


@refused('`param_groups[0]["lr"] = ...`', "the script changed the learning rate of parameter group 0")
class SetsRate(Habit):
    def before_step(self) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.number)


@refused("`optimizer.step(closure)` of `LBFGS`", "LBFGS needs a closure that runs the model several times")
class Closure(Habit):
    def optimize(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters())


@refused("parameters added or replaced in the loop", "the parameter '3.weight' was added to the model or replaced")
class Grows(Habit):
    def before_step(self) -> None:
        if self.number == 1:
            self.model.append(nn.Linear(1, 1))
            self.optimizer.add_param_group({"params": self.model[3].parameters()})


@refused("parametrizations added or removed in the loop", "was added to the model or replaced after run.")
class Reparametrizes(Habit):
    def before_step(self) -> None:
        if self.number == 1:
            parametrizations.weight_norm(self.model[0])


@refused("`model.half()`, `model.double()` between two steps", "the parameter '0.weight' was torch.float32 of shape (")
class Converts(Habit):
    def after_update(self) -> None:
        if self.number == 1:
            self.model.double()


@refused("`register_buffer` of a sparse tensor", "the buffer 'links' is a sparse_coo tensor")
class Graph(Habit):
    def make(self) -> nn.Module:
        module = network()
        module.register_buffer("links", torch.eye(3).to_sparse(), persistent=False)
        return module


@refused(
    "`p.data = ...` of another shape",
    "the parameter '0.bias' was torch.float32 of shape (7,) and is torch.float32 of shape (4,)",
)
class Shrinks(Habit):
    def after_update(self) -> None:
        if self.number == 1:
            self.model[0].bias.data = self.model[0].bias.data[:4]


@refused(
    "a second copy of the weights, moved in the forward pass",
    "a parameter or the state of the optimizer changed in step 0 before step.update(): in the forward pass",
)
class MovesInForward(Habit):
    def make(self) -> nn.Module:
        return nn.ModuleDict({"network": network(), "average": network().requires_grad_(False)})

    def optimize(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model["network"].parameters(), lr=0.1)

    def loss(self, x: Tensor) -> Tensor:
        for mean, parameter in zip(self.model["average"].parameters(), self.model["network"].parameters(), strict=True):
            mean.data = mean.data * 0.9 + parameter.data * 0.1
        return (self.model["network"](x) - self.model["average"](x)).square().mean()


@refused("`nn.Embedding(max_norm=...)`", "the parameter 'weight' changed between the first batch of a step and")
class Renormalizes(Habit):
    def make(self) -> nn.Module:
        return nn.Embedding(48, 2, max_norm=0.5)

    def loss(self, x: Tensor) -> Tensor:
        return self.model((x * 47).long()).square().mean()  # type: ignore[no-any-return]


class Queue(nn.Module):
    """Network with a queue of its last outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.register_buffer("queue", torch.zeros(96))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        y, place = self.network(x), int(self.queue_ptr)
        self.queue[place : place + len(y)] = y.detach().flatten()
        self.queue_ptr[0] = (place + len(y)) % len(self.queue)
        return y


@refused(
    "a queue that the forward pass writes at a position (`queue_ptr`)",
    "changed the integer buffer 'queue_ptr' in a way",
)
class Queues(Habit):
    def make(self) -> nn.Module:
        return Queue()


@refused(
    "`ZeroRedundancyOptimizer`, or another optimizer that shards its state", "run.optimizer() got a ZeroRedundancy"
)
class Zero(Habit):
    def optimize(self, model: nn.Module) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


class Shared(torch.optim.SGD):
    """Optimizer of which each rank updates every second parameter, and sends it to the others, as Muon of several ranks does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for place, parameter in enumerate(self.param_groups[0]["params"]):
            dist.broadcast(parameter.detach(), src=place % dist.get_world_size())


@refused("an optimizer with collectives in its step", "Shared.step() has begun a collective of torch.distributed")
class Shares(Habit):
    def optimize(self, model: nn.Module) -> torch.optim.Optimizer:
        return Shared(model.parameters(), lr=0.1)


@refused(
    "`optimizer.state[p]` changed before `step.batches()`",
    "before step.update(): in the forward pass, where a rank would change it once for each of its micro-batches, or before",
)
class HalvesBefore(Habit):
    def before_step(self) -> None:
        for entries in self.optimizer.state.values():
            entries["momentum_buffer"].data.mul_(0.5)


@refused(
    "features gathered from all ranks in a batch", "the script has begun a collective of torch.distributed in a batch"
)
class Gathers(Habit):
    def loss(self, x: Tensor) -> Tensor:
        features = self.model(x)
        gathered = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, features.detach())
        return -(features @ torch.cat(gathered).T).log_softmax(1).diagonal().mean()


@refused("`DataParallel(model)`", "run.model() got a DataParallel module")
class Divides(Habit):
    def make(self) -> nn.Module:
        return nn.Sequential(DataParallel(network()))


@refused(
    "`DistributedDataParallel(model)`, before or after `run.model()`",
    "DistributedDataParallel(model) was called with the model of the run",
)
class Distributes(Habit):
    def begin(self) -> None:
        self.model = DistributedDataParallel(self.model)


@refused(
    "`break` out of `step.batches()`",
    "step.update() was called before the loop over step.batches() of step 0 had ended",
)
class Breaks(Habit):
    def batches(self, step: Any) -> Any:
        yield next(step.batches())


@refused("`continue` without `step.backward(loss)`", "a batch of step 0 ended without step.backward(loss)")
class Skips(Habit):
    def batches(self, step: Any) -> Any:
        for number, batch in enumerate(step.batches()):
            if number:
                yield batch
