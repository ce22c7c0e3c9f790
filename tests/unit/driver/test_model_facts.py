"""Tests of the driver's inspection of a script's model, which needs no weights, workers or process group."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from undula.config.job import LoadedSpec, load_spec
from undula.driver.model_facts import ModelFacts, script_facts
from undula.errors import UsageError
from undula.parallel.capabilities import Feature
from undula.train.run import Run


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedSpec:
    file = tmp_path / "job.yaml"
    file.write_text("name: job\ndata: {train: /data/train}\n")
    return load_spec(file)


def facts_of(make: Callable[[], nn.Module], loaded: LoadedSpec) -> ModelFacts | None:
    def train(run: Run) -> None:
        run.map(lambda sample, random: sample)
        run.model(make())
        pytest.fail("the train function went on with a model that has no weights")

    return script_facts(train, loaded, 1000).model


def sharded() -> nn.Module:
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2, bias=False))
    fully_shard(module[0])
    return fully_shard(module)


def test_shapes_are_those_of_the_whole_model(loaded: LoadedSpec) -> None:
    whole = {"model.0.weight": (7, 5), "model.0.bias": (7,), "model.1.weight": (2, 7)}
    assert facts_of(lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2, bias=False)), loaded) == ModelFacts(
        whole, frozenset()
    )
    assert facts_of(sharded, loaded) == ModelFacts(whole, frozenset({Feature.SHARDED}))
    assert not dist.is_initialized()


def test_a_script_that_ends_before_its_model_has_no_facts(loaded: LoadedSpec) -> None:
    def end() -> nn.Module:
        raise SystemExit("this script needs a GPU")

    assert facts_of(end, loaded) is None


def test_a_partly_sharded_model_counts_as_sharded(loaded: LoadedSpec) -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2))
        fully_shard(module[0])
        return module

    facts = facts_of(make, loaded)
    assert facts is not None
    assert Feature.SHARDED in facts.features


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("is_sparse", [True, False])
def test_sparse_embeddings_are_found(loaded: LoadedSpec, kind: type[nn.Module], is_sparse: bool) -> None:
    facts = facts_of(lambda: nn.Sequential(kind(10, 3, sparse=is_sparse), nn.Linear(3, 1)), loaded)
    assert facts is not None
    assert (Feature.SPARSE_GRADIENTS in facts.features) == is_sparse


@pytest.mark.parametrize("trains", [True, False])
def test_only_parameters_that_train_make_a_model_sparse_or_half(loaded: LoadedSpec, trains: bool) -> None:
    def make() -> nn.Module:
        base = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 3, dtype=torch.bfloat16))
        return nn.Sequential(base.requires_grad_(trains), nn.Linear(3, 1))

    facts = facts_of(make, loaded)
    assert facts is not None
    assert facts.features == ({Feature.SPARSE_GRADIENTS, Feature.HALF_PARAMETERS} if trains else set())


def test_a_model_of_many_gigabytes_takes_no_memory(loaded: LoadedSpec) -> None:
    facts = facts_of(lambda: nn.Linear(2**20, 2**20), loaded)
    assert facts is not None
    assert facts.shapes["model.weight"] == (2**20, 2**20)


def test_a_script_that_raises_before_its_model_gives_no_facts(loaded: LoadedSpec) -> None:
    def train(run: Run) -> None:
        raise KeyError("width")

    assert script_facts(train, loaded, 1000).model is None
    with pytest.raises(UsageError, match="'weight' has no shape yet; run a batch through the module first"):
        facts_of(lambda: nn.LazyLinear(3), loaded)
    assert not dist.is_initialized()


def test_a_batch_may_not_depend_on_the_number_of_workers(loaded: LoadedSpec) -> None:
    def train(run: Run) -> None:
        model = run.model(nn.Linear(1, 1))
        print(dist.get_world_size())
        for step in run.steps():
            for batch in step.batches():
                step.backward(model(batch["x"]).mean() / dist.get_world_size())
            step.update()

    with pytest.raises(UsageError, match=r"^test_model_facts.py:\d+: get_world_size\(\) .*; use run.virtual_workers"):
        script_facts(train, loaded, 1000)

    def scaled(run: Run) -> None:
        model = run.model(nn.Linear(1, 1))
        print(f"{run.rank} of {run.world_size}")
        for step in run.steps():
            for batch in step.batches():
                step.backward(model(batch["x"]).mean() * run.world_size)
            step.update()

    with pytest.raises(
        UsageError, match=r"^test_model_facts.py:\d+: run.world_size is a part of .*; use run.virtual_workers"
    ):
        script_facts(scaled, loaded, 1000)


def test_a_learning_rate_may_not_depend_on_the_number_of_workers(loaded: LoadedSpec) -> None:
    def passed(run: Run) -> None:
        model = nn.Linear(1, 1)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=run.base_lr * run.world_size))

    def assigned(run: Run) -> None:
        lr = 0.1 * dist.get_world_size()
        run.optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr))

    def right(run: Run) -> None:
        print(dist.get_world_size(), run.world_size)
        run.optimizer(torch.optim.SGD(run.model(nn.Linear(1, 1)).parameters(), lr=run.base_lr * run.virtual_workers))

    for train in (passed, assigned):
        with pytest.raises(UsageError, match=r"^test_model_facts.py:\d+: a learning rate is computed from the number"):
            script_facts(train, loaded, 1000)
    assert script_facts(right, loaded, 1000).model


def test_the_script_sees_the_job_and_prints_nothing(loaded: LoadedSpec, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def train(run: Run) -> None:
        print("building the model")
        warnings.warn("weights are copied to a meta parameter", stacklevel=1)
        seen.append((run.rank, run.world_size, run.base_lr, run.device.type, run.plan.total_steps > 0))
        run.model(torch.nn.Linear(1, 1))

    assert script_facts(train, loaded, 1000).model is not None
    assert seen == [(0, 1, loaded.spec.schedule.base_lr, "meta", True)]
    assert capsys.readouterr() == ("", "")
