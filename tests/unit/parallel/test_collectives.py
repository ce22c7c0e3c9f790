"""What ranks agree on, over real gloo between real processes: sums of a step, buffers, gradients, at any cut of the work."""

import math

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn

from undula.parallel.engines.torch_engines import ExactEngine, TorchEngine
from undula.plan.plan import MicroBatch, assign
from undula.train.buffers import BufferMean
from undula.train.step_reduction import Asked, LocalStats, StepReducer, StepStats


def _reduce(rank: int, world_size: int) -> list[StepStats]:
    reducer = StepReducer(dist.group.WORLD)
    first = LocalStats(losses=[rank + 1.0], sample_digest=2**64 - 1 - rank, logged={f"only rank {rank}": (3.0, 2.0)})
    asked = Asked(leaves=rank == 1, has_saved=rank > 0)
    second = LocalStats(losses=[], sample_digest=0, logged={"shared": (float(rank), 1.0)}, asked=asked)
    return [reducer.reduce(first, 6), reducer.reduce(second, 6)]


def test_sums_are_those_of_the_step_and_digests_wrap_at_64_bits() -> None:
    results = on_ranks(3, _reduce)
    assert results[0] == results[1] == results[2]
    first, second = results[0]
    assert first.loss == (1 + 2 + 3) / 6
    assert first.sample_digest == sum(2**64 - 1 - rank for rank in range(3)) % 2**64
    assert first.logged == {f"only rank {rank}": 1.5 for rank in range(3)}
    assert second.logged == {"shared": 1.0}
    assert second.asked == Asked(leaves=True)


def _train_step(
    rank: int, world_size: int, shares: tuple[int, ...], dtype: torch.dtype = torch.float64, exact: bool = False
) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(dtype)
    data = torch.randn(sum(shares), 5, dtype=dtype)
    pieces = data.split(shares)
    engine = (ExactEngine if exact else TorchEngine)(torch.device("cpu"))
    model = engine.wrap(module)
    buffers = BufferMean(module, exact)
    buffers.begin_step()
    mine = assign(len(shares), world_size)[rank]
    engine.begin_step(len(mine))
    for virtual_worker in mine:
        engine.before_micro_batch(model, is_last=virtual_worker == mine[-1])
        buffers.begin_micro_batch()
        loss = model(pieces[virtual_worker]).square().mean()
        (loss * shares[virtual_worker] / sum(shares)).backward()
        engine.after_micro_batch(MicroBatch(0, virtual_worker, 0, shares[virtual_worker]))
        buffers.end_micro_batch(shares[virtual_worker])
    engine.end_step(sum(shares))
    buffers.end_step(sum(shares))
    gradient = [float(value) for parameter in module.parameters() for value in parameter.grad.flatten()]
    return gradient, [float(value) for buffer in module.buffers() for value in buffer.flatten()]


def test_gradients_and_buffers_do_not_depend_on_the_world_size() -> None:
    """Uneven shares, uneven assignment (5 virtual workers on 3 and 4 ranks), BatchNorm between."""
    shares = (4, 4, 3, 3, 2)
    alone = torch.tensor(on_ranks(1, _train_step, shares)[0][0]), torch.tensor(on_ranks(1, _train_step, shares)[0][1])
    for world_size in (2, 3, 4):
        for gradient, buffers in on_ranks(world_size, _train_step, shares):
            torch.testing.assert_close(torch.tensor(gradient), alone[0], rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(torch.tensor(buffers), alone[1], rtol=1e-12, atol=1e-14)


def test_exact_gradients_and_buffers_are_the_same_bit_for_bit_at_any_world_size() -> None:
    shares = (4, 4, 3, 3, 2)
    alone = on_ranks(1, _train_step, shares, torch.float32, True)[0]
    rounded = on_ranks(1, _train_step, shares, torch.float32)[0]
    torch.testing.assert_close(torch.tensor(alone[0]), torch.tensor(rounded[0]), rtol=1e-4, atol=1e-6)
    for world_size in (2, 3, 4):
        assert on_ranks(world_size, _train_step, shares, torch.float32, True) == [alone] * world_size


def _losses_in_parts(rank: int, world_size: int, losses: list[float]) -> float:
    reducer = StepReducer(dist.group.WORLD)
    own = assign(len(losses), world_size)[rank]
    return float(reducer.reduce(LocalStats(losses=[losses[place] for place in own]), 7).loss)


def test_the_loss_of_a_step_is_the_same_bit_for_bit_at_any_world_size() -> None:
    losses = [0.1, 1e17, -1e17, 3e-9, 2.7, 1 / 3]
    (alone,) = on_ranks(1, _losses_in_parts, losses)
    assert alone == math.fsum(losses) / 7
    for world_size in (2, 3, 4):
        assert on_ranks(world_size, _losses_in_parts, losses) == [alone] * world_size
    assert str(on_ranks(2, _losses_in_parts, [1.0, float("nan")])) == "[nan, nan]"
    assert on_ranks(2, _losses_in_parts, [1e300, 1e300]) == [2e300 / 7] * 2


def _constant_buffers(rank: int, world_size: int) -> list[Tensor]:
    module = nn.Module()
    for name, buffer in {"mask": torch.tensor([0.0, -torch.inf]), "table": torch.linspace(0, 1, 7)}.items():
        module.register_buffer(name, buffer)
    buffers = BufferMean(module)
    for _ in range(50):
        buffers.begin_step()
        buffers.begin_micro_batch()
        buffers.end_micro_batch([3, 0][rank])  # the second rank has no share
        buffers.end_step(3)
    return list(module.buffers())


def test_buffers_that_nothing_changes_stay_what_they_are() -> None:
    for mask, table in on_ranks(2, _constant_buffers):
        assert mask.tolist() == [0.0, -torch.inf]
        assert torch.equal(table, torch.linspace(0, 1, 7))


def test_buffers_go_back_to_before_an_unfinished_step_and_not_to_before_a_finished_one() -> None:
    norm = nn.BatchNorm1d(2)
    buffers = BufferMean(norm)
    for finished in (True, False):
        before = norm.running_mean.clone()  # type: ignore[union-attr]
        buffers.begin_step()
        norm.running_mean.add_(1)  # type: ignore[union-attr, operator]
        if finished:
            buffers.keep_step()
        buffers.undo_step()
        assert torch.equal(norm.running_mean, before + 1 if finished else before)  # type: ignore[arg-type]
