"""Tests of copies of the run's model, such as reference models, teachers and averages: each computes with its own weights."""

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from horovod_ranks import on_horovod_ranks
from numbers_job import cpu_run, network, numbers_job
from ranks import on_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from undula.parallel.spec import ActivationsSpec, GradientSpec
from undula.plan.precision import PrecisionSpec
from undula.train.job import Job


class Network(nn.Module):
    """A network with blocks that `activations` finds, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x


SETTINGS: dict[str, dict[str, Any]] = {
    "deterministic": {"deterministic": True},
    "compiled": {"compile": True},
    "compiled units": {"compile": True, "activations": ActivationsSpec("none")},
    **{f"keep {keep}": {"activations": ActivationsSpec(keep)} for keep in ("none", "selective", "sqrt")},
    "offloaded": {"activations": ActivationsSpec("all", offload=True)},
    "bf16": {"precision": PrecisionSpec(compute="bf16")},
    "bf16, compiled": {"precision": PrecisionSpec(compute="bf16"), "compile": True},
    "adasum": {"gradient": GradientSpec(reduce="adasum")},
}
NOISE = {"gradient": GradientSpec(noise_every_steps=1)}


def averaged(model: nn.Module) -> nn.Module:
    module: nn.Module = AveragedModel(model).module
    return module


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "average": averaged,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "copy of a part": lambda model: _with_part(copy.deepcopy(model), copy.deepcopy(model.inner)),
}


def _with_part(model: nn.Module, part: nn.Module) -> nn.Module:
    model.inner = part
    return model


def check_copies(model: nn.Module, uses_bf16: bool) -> None:
    """Check that copies of a model compute and train like a module that was made with their weights."""
    x = torch.linspace(-1, 1, 6)[:, None]
    torch.manual_seed(11)
    plain = Network()
    for name, make in COPIES.items():
        before = {key: value.clone() for key, value in model.state_dict().items()}
        gradients = {key: each.grad for key, each in model.named_parameters()}
        found = make(model)
        found.load_state_dict(plain.state_dict())
        expected = copy.deepcopy(plain)
        with torch.autocast("cpu", torch.bfloat16, enabled=uses_bf16, cache_enabled=False):
            wanted = expected(x).float()
        output = found(x)
        assert torch.equal(output, wanted), f"{name} computes with other weights than its own"
        output.square().sum().backward()
        wanted.square().sum().backward()
        for one, other in zip(found.parameters(), expected.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
        found.zero_grad()
        assert not any(each.grad is not None for each in found.parameters()), name
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), name
        assert all(each.grad is gradients[key] for key, each in model.named_parameters()), name


def _copied(rank: int, world_size: int, job: Job) -> None:
    with torch.compiler.set_stance("force_eager"):  # what is compiled does not matter here
        run = cpu_run(job, rank, world_size)
        torch.manual_seed(5)
        model = run.model(Network())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        uses_bf16 = job.precision.compute == "bf16"
        check_copies(model, uses_bf16)
        for step in run.steps():
            for batch in step.batches():
                check_copies(model, uses_bf16)
                step.backward(model(batch["x"][:, None] / 48).square().mean())
                check_copies(model, uses_bf16)
            step.update()
        run.free()


@pytest.fixture
def deterministic_as_before() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("process_group", "deterministic_as_before")
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_copy_of_the_model_computes_with_its_own_weights(tmp_path: Path, settings: str) -> None:
    _copied(0, 1, replace(numbers_job(tmp_path, max_steps=2), **SETTINGS[settings]))


def test_hooks_that_reduce_and_measure_gradients_are_not_copied(tmp_path: Path) -> None:
    on_ranks(2, _copied, replace(numbers_job(tmp_path, max_steps=2), **NOISE))


def test_hooks_of_horovod_are_not_copied(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not installed: make horovod")
    on_horovod_ranks(2, _copied, replace(numbers_job(tmp_path, max_steps=2), engine="horovod", **NOISE))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("copied", [copy.deepcopy, AveragedModel, pickle.dumps])
def test_torch_refuses_to_copy_a_sharded_model(tmp_path: Path, copied: Callable[[nn.Module], Any]) -> None:
    run = cpu_run(numbers_job(tmp_path))
    model = run.model(network(is_sharded=True))
    with pytest.raises((AssertionError, pickle.PicklingError)):
        copied(model)
    run.free()
