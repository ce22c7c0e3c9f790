"""Tests of models with SyncBatchNorm: its statistics are those of virtual workers, so that they do not depend on the ranks."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from numbers_job import cpu_run, numbers_job
from torch import nn

from undula.errors import UsageError
from undula.parallel.batch_norm import problem_of_batch_norm, replace_sync_batch_norm
from undula.state.events import WarningEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import open_store

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


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_an_event_says_that_statistics_are_those_of_virtual_workers(tmp_path: Path, norm: type[nn.Module]) -> None:
    """The optimizer is made before `run.model()`, which keeps the module and its parameters."""
    job = numbers_job(tmp_path)
    run = cpu_run(job)
    module = nn.Sequential(nn.Linear(1, 7), norm(7), nn.Linear(7, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert run.model(module) is module
    run.optimizer(optimizer)
    for step in run.steps():
        for batch in step.batches():
            step.backward(module(batch["x"][:, None] / 48).square().mean())
        step.update()
    run.free()
    events = events_of(read_ledger(open_store(job.run_url)).events, WarningEvent)
    messages = [event.message for event in events if event.code == "sync_batch_norm"]
    assert len(messages) == (norm is nn.SyncBatchNorm)
    assert all("BatchNorm does" in message and "workers: 1; use" in message for message in messages)
