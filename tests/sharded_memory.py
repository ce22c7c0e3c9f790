"""Memory and bytes sent of sharded steps as they are on real ranks, from torch's allocator and from its collectives."""

import gc
import time
import weakref
from dataclasses import dataclass
from typing import Any

import engine_steps
import pytest
import torch
import torch.distributed as dist
from memory_models import SHARDED
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from undula.parallel.activations import keep_activations
from undula.parallel.precision import dtype_of
from undula.parallel.spec import ActivationsSpec, ShardingSpec
from undula.plan.plan import Plan, PlanSpec
from undula.plan.precision import Compute
from undula.recovery.live_state import LiveState
from undula.recovery.snapshot import aligned_bytes

STEPS = 4
RELEASE_S = 0.003
"""Seconds in which a thread of gloo frees the tensors of a collective that has ended."""


@dataclass(frozen=True)
class Sharded:
    """Steps of a sharded model."""

    name: str
    """Name of the model in `memory_models.SHARDED`."""
    stage: int
    micro_batch: int
    """Samples of a micro-batch. A virtual worker has two samples."""
    compute: Compute = "fp32"
    keep: str = "all"
    gather: str = "fp32"
    virtual_workers: int = 4

    def __str__(self) -> str:
        return f"{self.name}-{self.stage}-{self.micro_batch}-{self.compute}-{self.keep}-{self.gather}"

    @property
    def sharding(self) -> ShardingSpec:
        return ShardingSpec(self.stage, gather=self.gather)  # type: ignore[arg-type]

    @property
    def plan(self) -> PlanSpec:
        batch = 2 * self.virtual_workers
        return PlanSpec(
            global_batch=batch, virtual_workers=self.virtual_workers, micro_batch=self.micro_batch, epochs=99
        )


@dataclass(frozen=True)
class Measured:
    """What a rank took, in bytes."""

    held: int
    """Parameters, buffers and the state of the optimizer between two steps."""
    held_after_validation: int
    peaks: tuple[int, ...]
    """Most memory of the model and its steps, by step."""
    sent: tuple[int, ...]
    """What the rank sent to others, by step."""
    snapshot: int
    """What a snapshot copies."""


def measured(rank: int, world_size: int, case: Sharded) -> Measured:
    """Train a few steps on a rank, and return what they took."""
    train, plan = SHARDED[case.name], Plan(case.plan, 64)
    torch.manual_seed(0)
    data = train.data()
    with sending(rank) as sent, LiveOnRank() as live:
        module = train.make_model()
        engine = engine_steps.placed(
            module,
            rank,
            world_size,
            case.plan.virtual_workers,
            sharding=case.sharding,
            compute=case.compute,
        )
        keep_activations(module, ActivationsSpec(keep=case.keep))
        if dtype := dtype_of(case.compute):
            engine.compute_in(dtype)
        optimizer = train.make_optimizer(module)
        engine.prepare(module, optimizer)
        layout = engine.layout
        shares = layout.assignment(case.plan.virtual_workers)
        peaks, bytes_sent = [], []
        for index in range(STEPS):
            begun = sent[0]
            live.restart()
            steps = range(index, index + 1)
            work = plan.aligned_work(steps, shares, layout.cell)
            engine.begin_step(work)
            for place, micro_batch in enumerate(work):
                samples = max(micro_batch.samples, 1)
                batch = torch.utils.data.default_collate([data[each] for each in range(samples)])  # type: ignore[index]
                engine.before_forward(place == len(work) - 1)
                loss = train.loss(module, batch)
                weight = micro_batch.samples / case.plan.global_batch
                engine.backward(loss, weight, micro_batch, place == len(work) - 1)
            engine.finish_gradients(case.plan.global_batch)
            engine.step()
            peaks.append(live.restart())
            bytes_sent.append(sent[0] - begun)
        del batch, loss
        gc.collect()
        held = held_by(module, optimizer)
        pieces = LiveState(module, optimizer).held().pieces
        with torch.no_grad():
            train.loss(module, torch.utils.data.default_collate([data[0]]))  # type: ignore[index]
        engine.reshard()
        after = held_by(module, optimizer)
    snapshot = sum(aligned_bytes(piece.tensor) for piece in pieces.values())
    return Measured(held, after, tuple(peaks), tuple(bytes_sent), snapshot)


def held_by(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the live tensors of a model and its optimizer, of which each rank has its part."""
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    tensors = [getattr(each, "_local_tensor", each) for each in (*module.parameters(), *module.buffers(), *states)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


class LiveOnRank(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all live storages after each operation of the block, with those whose size `fully_shard` changes.

    torch's own profiler misses what threads of gloo free.

    Attributes:
        peak: Most bytes since the last call of `restart`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def restart(self) -> int:
        """Return the peak, and begin anew."""
        peak, self.peak = self.peak, 0
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # the operations on the shards follow
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not isinstance(tensor, FakeTensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._known:
                    self._known[key] = weakref.ref(storage, lambda _, key=key: self._known.pop(key, None))
        storages = [each() for each in list(self._known.values())]
        self.peak = max(self.peak, sum(each.nbytes() for each in storages if each is not None))
        return result


class sending:
    """Context in which the bytes that a rank sends to others are counted."""

    def __init__(self, rank: int):
        self._rank, self._patch = rank, pytest.MonkeyPatch()

    def __enter__(self) -> list[int]:
        sent, rank = [0], self._rank
        exchange, gather = dist.all_to_all_single, dist.all_gather_single

        def exchanging(output: Tensor, source: Tensor, received: list[int], sizes: list[int], group: Any) -> None:
            sent[0] += sum(size for other, size in enumerate(sizes) if other != rank) * source.itemsize
            exchange(output, source, received, sizes, group=group)
            time.sleep(RELEASE_S)

        def gathering(output: Tensor, source: Tensor, group: Any, async_op: bool = False) -> Any:
            sent[0] += source.nbytes * (dist.get_world_size(group) - 1)
            result = gather(output, source, group=group, async_op=async_op)
            time.sleep(RELEASE_S)
            return result

        self._patch.setattr(dist, "all_to_all_single", exchanging)
        self._patch.setattr(dist, "all_gather_single", gathering)
        return sent

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
