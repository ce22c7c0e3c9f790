"""Tests of the accumulator along the tree: gradients have the same bits at any number of ranks, and buffers take little memory."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_steps import placed, run_backward, step_gradients
from ranks import on_ranks
from torch import Tensor, nn

from undula.errors import UsageError
from undula.parallel.engines.engine import Engine
from undula.parallel.reduce.tree import TreeAccumulator
from undula.parallel.spec import Compression, GradientSpec
from undula.plan.plan import MicroBatch


class Kinds(nn.Module):
    """Model with gradients of several dtypes, layouts and kinds. One layer is used by odd virtual workers only, and one by none."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.words = nn.Embedding(7, 3, sparse=True)
        self.odd = nn.Linear(3, 3)
        self.unused = nn.Linear(2, 2)
        self.wide = nn.Linear(3, 1, dtype=torch.float64)
        self.narrow = nn.Linear(3, 1, dtype=torch.bfloat16)
        self.turn = nn.Parameter(torch.tensor([1 + 1j, 0.5 - 2j, 1j]))
        self.scalar = nn.Parameter(torch.tensor(0.3))

    def forward(self, images: Tensor, words: Tensor, is_odd: bool) -> Tensor:
        features = self.convolution(images).mean((2, 3))[:, :3] + self.words(words)
        features = self.odd(features) if is_odd else features
        outputs = self.wide(features.double()).float() + self.narrow(features.bfloat16()).float()
        return (outputs * (features * self.turn).abs() * self.scalar).square().mean()


def _gradients(rank: int, world_size: int, steps: Sequence[tuple[int, ...]], gradient: GradientSpec) -> list[Any]:
    """Return the gradients of some steps, given the samples of each virtual worker in each step."""
    torch.manual_seed(0)
    module = Kinds()
    engine = placed(module, rank, world_size, len(steps[0]), gradient=gradient)
    found = []
    for number, samples in enumerate(steps):
        torch.manual_seed(number)
        images, words = (
            torch.randn(sum(samples), 3, 8, 8).split(samples),
            torch.randint(7, (sum(samples),)).split(samples),
        )
        module.odd.requires_grad_(number != 1)
        found.append(step_gradients(engine, samples, lambda v: module(images[v], words[v], bool(v % 2))))  # noqa: B023
    return found


STEPS = {
    "6": [(3, 2, 2, 2, 2, 2), (3, 2, 2, 2, 2, 2), (1, 1, 1, 0, 0, 0), (3, 2, 2, 2, 2, 2)],
    "8": [(2, 2, 1, 2, 2, 2, 2, 3), (2, 2, 1, 2, 2, 2, 2, 3), (0, 0, 0, 0, 0, 1, 0, 0), (2, 2, 1, 2, 2, 2, 2, 3)],
}


@pytest.mark.parametrize(
    ("virtual_workers", "compression", "world_sizes"),
    [("6", "none", (2, 3, 4, 5)), ("8", "none", (3,)), ("6", "fp16", (2, 3)), ("8", "bf16", (2,))],
)
def test_gradients_have_the_same_bits_at_any_number_of_ranks(
    virtual_workers: str, compression: Compression, world_sizes: tuple[int, ...]
) -> None:
    """From the second step on, gradients are sent during the backward pass; the second step has other parameters."""
    arguments = (STEPS[virtual_workers], GradientSpec(compression=compression))
    (alone,) = on_ranks(1, _gradients, *arguments)
    assert [gradient is None for gradient in alone[0]].count(True) == 2  # of the unused layer
    for world_size in world_sizes:
        assert on_ranks(world_size, _gradients, *arguments) == [alone] * world_size


def _held(rank: int, world_size: int, virtual_workers: int) -> float:
    """Return how many gradients this rank holds at most, in buffers and in the parameters."""
    module = nn.Sequential(*[nn.Linear(40, 40) for _ in range(8)])
    engine: Engine = placed(module, rank, world_size, virtual_workers)
    accumulator = engine._accumulator
    assert isinstance(accumulator, TreeAccumulator)
    most = 0.0

    def count(gradient: Tensor) -> None:
        nonlocal most
        held = [buffer for bucket in accumulator._buckets for buffer in bucket._buffers.values()]
        if accumulator._exchange:
            held += [each.received for each in accumulator._exchange._transfers.values() if each.received is not None]
        held += [
            each
            for bucket in accumulator._buckets
            for root in bucket._fold.roots.values()
            for each in root
            if each is not None
        ]
        held += [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
        most = max(most, sum(memory.values()) / sum(parameter.nbytes for parameter in module.parameters()))

    next(module.parameters()).register_post_accumulate_grad_hook(count)
    for _ in range(3):
        step_gradients(engine, [2] * virtual_workers, lambda place: module(torch.ones(2, 40)).square().mean())
    return most


@pytest.mark.parametrize(("virtual_workers", "most"), [(4, 3), (8, 4)])
def test_buffers_hold_few_gradients(virtual_workers: int, most: int) -> None:
    for world_size in (1, 2, 3):
        assert max(on_ranks(world_size, _held, virtual_workers)) <= most * 1.05  # padding


def _sent(rank: int, world_size: int, virtual_workers: int) -> float:
    """Return the size of the messages of this rank in a step, in gradients."""
    module = nn.Linear(400, 400)
    engine = placed(module, rank, world_size, virtual_workers)
    sent = 0
    send = dist.batch_isend_irecv

    def count(messages: list[dist.P2POp]) -> list[dist.Work]:
        nonlocal sent
        sent += sum(message.tensor.nbytes for message in messages if message.op is dist.isend)
        return send(messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", count)
        step_gradients(engine, [1] * virtual_workers, lambda place: module(torch.ones(1, 400)).square().mean())
    return sent / sum(parameter.nbytes for parameter in module.parameters())


@pytest.mark.parametrize(
    ("virtual_workers", "world_size", "of_ring"),
    [(4, 2, 1), (4, 4, 1), (8, 2, 1), (8, 4, 1), (6, 3, 1), (6, 4, 1), (6, 2, 1.5), (8, 3, 4 / 3)],
)
def test_messages_take_the_bytes_of_a_ring_where_each_rank_has_a_subtree(
    virtual_workers: int, world_size: int, of_ring: float
) -> None:
    ring = 2 * (world_size - 1)
    assert sum(on_ranks(world_size, _sent, virtual_workers)) == pytest.approx(of_ring * ring, rel=0.01)


class _OneMemory(nn.Module):
    """Model whose two parameters get gradients that are one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))

    def forward(self, factor: float) -> Tensor:
        return (factor * (self.one.unsqueeze(0) + self.other.unsqueeze(0))).square().mean()


def _of_one_memory(rank: int, world_size: int, virtual_workers: int) -> list[Any]:
    """Return the gradients of a step with four micro-batches on each of some virtual workers."""
    torch.manual_seed(0)
    module = _OneMemory()
    engine = placed(module, rank, world_size, virtual_workers)
    own = engine.layout.virtual_workers(virtual_workers)
    work = [MicroBatch(0, virtual_worker, number, 1) for virtual_worker in own for number in range(4)]
    engine.begin_step(work)
    for micro_batch in work:
        is_last = micro_batch is work[-1]
        engine.before_forward(is_last)
        engine.backward(module(1.0), 1 / (4 * virtual_workers), micro_batch, is_last)
    engine.finish_gradients(4 * virtual_workers)
    return [parameter.grad.tolist() for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("virtual_workers", "world_size"), [(1, 1), (4, 1), (4, 2)])
def test_gradients_that_are_one_memory_are_added_up_apart(virtual_workers: int, world_size: int) -> None:
    module = _OneMemory()
    expected = torch.autograd.grad(module(1.0), [*module.parameters()])
    for gradients in on_ranks(world_size, _of_one_memory, virtual_workers):
        torch.testing.assert_close(torch.tensor(gradients), torch.stack(expected))


def _kept(rank: int, world_size: int) -> list[list[Any]]:
    """Return the gradients of each virtual worker and of the step that a script has kept, and what they were when it kept them."""
    module = nn.Linear(3, 1)
    engine = placed(module, rank, world_size, 8)
    kept, before = list[Tensor](), list[Any]()

    def keep(gradient: Tensor | None) -> None:
        assert gradient is not None
        kept.append(gradient.detach())
        before.append(gradient.tolist())

    def loss(place: int) -> Tensor:
        bias = module.bias if place % 2 else None
        return F.linear(torch.full((1, 3), place + 1.0), module.weight, bias).square().mean()

    for parameter in module.parameters():
        parameter.register_hook(keep)  # type: ignore[no-untyped-call]
    for _ in range(2):
        run_backward(engine, [1] * 8, loss)
        keep(module.weight.grad)
        engine.free_gradients()
    return [before, [each.tolist() for each in kept]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_that_a_script_keeps_do_not_change(world_size: int) -> None:
    for before, after in on_ranks(world_size, _kept):
        assert before == after


def test_a_sparse_gradient_of_a_layer_that_is_not_sparse_is_refused(process_group: None) -> None:
    module = nn.Linear(3, 3, bias=False)
    engine = placed(module, 0, 1, 2)
    with pytest.raises(UsageError, match="sparse gradient of a parameter of no layer that was made with sparse=True"):
        run_backward(engine, [1, 1], lambda place: F.embedding(torch.tensor([1]), module.weight, sparse=True).mean())
