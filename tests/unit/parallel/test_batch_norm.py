"""Tests of models with SyncBatchNorm: its statistics are those of virtual workers, so that they do not depend on the ranks."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from numbers_job import cpu_run, numbers_job
from ranks import on_ranks
from torch import Tensor, nn

from undula.errors import UsageError
from undula.parallel.batch_norm import problem_of_batch_norm, replace_sync_batch_norm
from undula.state.events import WarningEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import open_store
from undula.train.job import Job

OPTIONS = {"eps": 1e-3, "momentum": 0.3}


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
@pytest.mark.parametrize("more", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_a_synchronized_layer_becomes_the_batch_norm_of_its_input(kind: type[nn.Module], more: dict) -> None:
    dimensions = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}[kind]
    layer, expected = nn.SyncBatchNorm(3, **{**OPTIONS, **more}), kind(3, **{**OPTIONS, **more})
    before = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    assert replace_sync_batch_norm(layer) == [""]
    after = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    assert after.keys() == before.keys()
    assert all(after[name] is each for name, each in before.items())
    x = torch.randn(5, 3, *[2] * dimensions)
    for training in (True, False):
        outputs = [each.train(training)(x) for each in (layer, expected)]
        assert torch.equal(*outputs)
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(copied(x), copy.deepcopy(expected)(x))
    assert all(torch.equal(value, layer.state_dict()[name]) for name, value in expected.state_dict().items())


def test_layers_keep_their_modes_and_places_and_other_layers_stay() -> None:
    frozen = nn.SyncBatchNorm(2).eval()
    shared = nn.SyncBatchNorm(2)
    model = nn.Sequential(nn.BatchNorm1d(2), frozen, nn.Sequential(shared), shared)
    assert replace_sync_batch_norm(model) == ["1", "2.0"]
    assert (model[1], model[2][0], model[3]) == (frozen, shared, shared)
    assert type(model[0]) is nn.BatchNorm1d
    assert (frozen.training, shared.training) == (False, True)
    assert replace_sync_batch_norm(model) == []
    with pytest.raises(ValueError, match="expected at least 2D input"):
        shared(torch.ones(2))


class Special(nn.SyncBatchNorm):
    """A layer that does something else."""


def test_a_subclass_is_refused_by_its_name() -> None:
    problem = problem_of_batch_norm(nn.Sequential(Special(2)))
    assert problem is not None
    assert problem.startswith("run.model() got a module whose layer '0' is a Special, a kind of SyncBatchNorm, whose")
    with pytest.raises(UsageError, match="is a Special"):
        replace_sync_batch_norm(nn.Sequential(nn.SyncBatchNorm(2), Special(2)))


class Network(nn.Module):
    """Network with a layer of batch normalization."""

    def __init__(self, norm: Callable[[int], nn.Module]):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(1, 7), norm(7), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))  # type: ignore[no-any-return]


def _trained(rank: int, world_size: int, job: Job, norm: Callable[[int], nn.Module]) -> list[list[float]]:
    """Return the model's weights and buffers after a training whose optimizer was made before `run.model()`."""
    run = cpu_run(job, rank, world_size)
    module = Network(norm)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = run.model(module)
    assert model is module
    run.optimizer(optimizer)
    for step in run.steps():
        for batch in step.batches():
            step.backward(model(batch["x"][:, None] / 48).square().mean())
        step.update()
    run.free()
    return [each.flatten().tolist() for each in model.state_dict().values()]


def test_statistics_are_those_of_virtual_workers_at_any_number_of_ranks_and_an_event_says_so(tmp_path: Path) -> None:
    """Three ranks have two, one and one of the four virtual workers."""
    expected = None
    for world_size, norm in ((1, nn.BatchNorm1d), (1, nn.SyncBatchNorm), (3, nn.SyncBatchNorm)):
        job = replace(numbers_job(tmp_path / f"{world_size} {norm.__name__}"), deterministic=True)
        for found in on_ranks(world_size, _trained, job, norm):
            expected = expected or found
            assert found == expected
        events = events_of(read_ledger(open_store(job.run_url)).events, WarningEvent)
        told = [event.message for event in events if event.code == "sync_batch_norm"]
        assert len(told) == (norm is nn.SyncBatchNorm)
        assert all("BatchNorm does" in message and "workers: norm; use" in message for message in told)
