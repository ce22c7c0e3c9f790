"""Tests of optimizers: weight decay, scaling by norms, and independence of shards, resizes and resumes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from undula.config.job import load_spec
from undula.errors import RunError, SpecError
from undula.optim.optimizers import SETTINGS, OptimizerConfig, make_optimizer
from undula.plan.noise import Measured
from undula.plan.plan import Plan, PlanSpec
from undula.plan.schedule import ScheduleSpec
from undula.state.model_state import load_state, model_and_optimizer_state
from undula.study.spec import CLASSES
from undula.train.learning_rate import GroupRates, rate_for

LAYERWISE = ("lars", "lamb")
DECAY, LR = 0.1, 0.5


class Network(nn.Module):
    """Model with an embedding, a matrix with a bias, a normalization layer, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.norm(self.words(words))) * self.scale  # type: ignore[no-any-return]


def config(name: str, **settings: Any) -> OptimizerConfig:
    return OptimizerConfig(name=name, weight_decay=DECAY, **settings)  # type: ignore[arg-type]


def network(gradient: float = 0.3) -> Network:
    torch.manual_seed(0)
    module = Network()
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter) * gradient
    return module


@pytest.mark.parametrize("name", SETTINGS)
def test_matrices_and_embeddings_decay_and_other_parameters_do_not(name: str) -> None:
    module = network(gradient=0.0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    optimizer = make_optimizer(module, config(name), LR)
    optimizer.step()
    moved = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"words.weight", "out.weight"}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)


def test_rules_identify_each_optimizer_by_its_class() -> None:
    found = {name: type(make_optimizer(network(), config(name), LR)).__name__ for name in SETTINGS}
    assert found == CLASSES


@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_without_biases_has_one_group_whose_state_can_be_saved(name: str) -> None:
    module = nn.Linear(2, 2, bias=False)
    optimizer = make_optimizer(module, config(name), LR)
    assert len(optimizer.param_groups) == 1
    state = model_and_optimizer_state(module, optimizer)
    load_state(module, optimizer, state)


def test_the_first_step_of_lars_equals_the_paper() -> None:
    """You et al. 2017, algorithm 1: the local rate is eta |w| / (|g| + beta |w|), and the step lr local (g + beta w)."""
    module, before = network(), network()
    make_optimizer(module, config("lars", trust_coefficient=0.02), LR).step()
    for (name, after), former in zip(module.named_parameters(), before.parameters(), strict=True):
        weight, gradient, local, decay = former.detach(), former.grad, 1.0, 0.0
        assert gradient is not None
        if weight.ndim > 1:
            local, decay = 0.02 * float(weight.norm() / (gradient.norm() + DECAY * weight.norm())), DECAY
        torch.testing.assert_close(after.detach(), weight - LR * local * (gradient + decay * weight), msg=name)


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_steps_of_lamb_equal_the_paper(factor: float) -> None:
    """You et al. 2020, algorithm 2 with phi(z) = z, for three steps; also for weights of large norms."""
    module, beta1, beta2, eps = network(), 0.9, 0.99, 1e-6
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor)
    optimizer = make_optimizer(module, config("lamb", betas=(beta1, beta2)), 0.01)
    x = {name: value.detach().double() for name, value in module.named_parameters()}
    m, v = ({name: torch.zeros_like(value) for name, value in x.items()} for _ in range(2))
    for t in (1, 2, 3):
        for name, parameter in module.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            g = parameter.grad.double()
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g**2
            r = m[name] / (1 - beta1**t) / ((v[name] / (1 - beta2**t)).sqrt() + eps)
            if r.ndim > 1:
                r = r + DECAY * x[name]
                r = r * x[name].norm() / r.norm()
            x[name] = x[name] - 0.01 * r
        optimizer.step()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.detach().double(), x[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", LAYERWISE)
def test_weights_and_gradients_of_norm_zero_are_handled(name: str) -> None:
    module = nn.Linear(2, 2)
    nn.init.zeros_(module.weight)
    optimizer = make_optimizer(module, OptimizerConfig(name=name), LR)  # type: ignore[arg-type]
    for gradient in (torch.zeros(2, 2), torch.ones(2, 2)):
        module.weight.grad = gradient
        optimizer.step()
        assert bool(module.weight.isfinite().all())
    assert bool((module.weight < 0).all())


@pytest.mark.parametrize("name", LAYERWISE)
def test_state_other_than_tensors_does_not_change_between_steps(name: str) -> None:
    """A changed value would make snapshots recompute their memory layout."""
    module = network()
    optimizer = make_optimizer(module, config(name), LR)
    seen = []
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        state = model_and_optimizer_state(module, optimizer)
        seen.append({key: value for key, value in state.items() if not isinstance(value, Tensor)})
        tensors = {key.rpartition(".")[2] for key in state if key.startswith("optimizer.state")}
    assert seen[0] == seen[1]
    assert tensors == ({"momentum_buffer"} if name == "lars" else {"exp_avg", "exp_avg_sq", "step"})


@pytest.mark.parametrize("name", LAYERWISE)
def test_both_groups_follow_the_schedule_and_lambs_betas_follow_the_rule(name: str) -> None:
    plan = Plan(PlanSpec(global_batch=8, virtual_workers=8, batch="elastic"), 800)
    schedule = ScheduleSpec(decay="constant", batch_rule="adam_sde")
    optimizer = make_optimizer(network(), config(name), 0.1)
    rates = GroupRates(optimizer, schedule, plan)
    rate, _ = rate_for(schedule, plan, 4, 0, {})
    rates.set(optimizer, rate.at(32, 32, 4, Measured()))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.2])
    for group in optimizer.param_groups if name == "lamb" else ():
        assert (group["betas"], group["eps"]) == (pytest.approx((0.6, 0.996)), pytest.approx(5e-7))
    optimizer.step()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"name": "adamw", "momentum": 0.9},
            "momentum is 0.9, but name: adamw has no such setting; remove it or use ",
        ),
        (
            {"name": "lamb", "nesterov": False},
            "nesterov is false, but name: lamb has no such setting; .* name: sgd or lars",
        ),
        ({"name": "sgd", "betas": (0.9, 0.99)}, r"betas is \(0.9, 0.99\), but name: sgd .* adam or adamw or lamb"),
        ({"name": "lars", "eps": 1e-8}, "eps is 1e-08, but name: lars has no such setting"),
        ({"name": "sgd", "trust_coefficient": 0.1}, "trust_coefficient is 0.1, .* remove it or use name: lars"),
        (
            {"name": "lars", "momentum": 0.0, "nesterov": True},
            "nesterov is true, but momentum is 0; set momentum above 0",
        ),
    ],
)
def test_a_setting_that_the_optimizer_does_not_have_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        OptimizerConfig(**settings)


@dataclass(frozen=True)
class Config:
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


def test_a_jobs_optimizer_is_checked_with_its_yaml(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: x\ndata: {train: x}\nconfig:\n  optimizer:\n    name: lars\n    weight_decay: 0.1\n")
    loaded = load_spec(file, ["config.optimizer.momentum=0.5"], Config)
    assert loaded.config.optimizer == config("lars", momentum=0.5)
    assert OptimizerConfig(**load_spec(file).config["optimizer"]) == config("lars")
    assert load_spec(file, ["config.optimizer={name: lamb, betas: [0.9, 0.99]}"], Config).config.optimizer.betas
    with pytest.raises(SpecError) as refusal:
        load_spec(file, ["config.optimizer.eps=1e-3"], Config)
    assert str(refusal.value) == (
        "command line: config.optimizer.eps is 0.001, but name: lars has no such setting; remove it or use name: "
        "adam or adamw or lamb"
    )


@pytest.mark.parametrize("name", LAYERWISE)
def test_parameters_of_several_dtypes_move_as_they_do_separately(name: str) -> None:
    def step(*modules: nn.Linear) -> list[Tensor]:
        holder = nn.ModuleList(modules)
        for parameter in holder.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        make_optimizer(holder, config(name), LR).step()
        return [module.weight.detach().clone() for module in modules]

    def linear(dtype: torch.dtype) -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(3, 2, dtype=dtype)

    alone = [*step(linear(torch.float32)), *step(linear(torch.float64))]
    together = step(linear(torch.float32), linear(torch.float64))
    assert [torch.equal(*pair) for pair in zip(alone, together, strict=True)] == [True, True]


@pytest.mark.parametrize("name", LAYERWISE)
def test_a_step_changes_neither_gradients_nor_a_parameter_without_one_and_returns_the_loss(name: str) -> None:
    module, before = network(), network()
    module.out.weight.grad = None

    def closure() -> float:
        assert torch.is_grad_enabled()
        return 0.25

    optimizer = make_optimizer(module, config(name), LR)
    assert optimizer.step(closure) == 0.25
    for (key, parameter), former in zip(module.named_parameters(), before.parameters(), strict=True):
        has_gradient = key != "out.weight"
        assert torch.equal(parameter, former) != has_gradient
        assert (optimizer.state.get(parameter) is not None) == has_gradient
        assert torch.equal(parameter.grad, former.grad) if has_gradient else parameter.grad is None  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAYERWISE)
def test_sparse_gradients_are_refused(name: str) -> None:
    module = nn.Embedding(4, 2, sparse=True)
    module(torch.tensor([1])).sum().backward()
    problem = f"^{name.upper()} does not support sparse gradients; .* sparse=False or use SGD$"
    with pytest.raises(RunError, match=problem):
        make_optimizer(module, config(name), LR).step()


def test_lamb_refuses_complex_numbers() -> None:
    with pytest.raises(SpecError, match="lamb, which supports real parameters only, but weight is complex; use adamw"):
        make_optimizer(nn.Linear(2, 2, dtype=torch.complex64), config("lamb"), LR)


def _stepped(rank: int, world_size: int, is_sharded: bool, dtype: torch.dtype) -> dict[str, list[float]]:
    """Return the weights after steps of each optimizer. All ranks have the same samples, so the mean is that of one rank."""
    found = {}
    for name in LAYERWISE:
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
        if is_sharded:
            fully_shard(module[0])
            fully_shard(module)
        optimizer = make_optimizer(module, config(name), 10.0 if name == "lars" else 0.1)
        for _ in range(3 if dtype == torch.float32 else 1):
            module(torch.randn(6, 5).to(dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in module.parameters()]
        found[name] = torch.cat([each.flatten() for each in whole]).tolist()
    return found


@pytest.mark.parametrize(
    ("world_size", "dtype", "rel"), [(2, torch.float32, 1e-5), (4, torch.float32, 1e-5), (2, torch.bfloat16, 0.01)]
)
def test_norms_are_those_of_whole_parameters_if_ranks_have_shards(
    world_size: int, dtype: torch.dtype, rel: float
) -> None:
    """Matrices of seven and three rows give shards of different norms and, on four ranks, an empty shard."""
    alone = _stepped(0, 1, False, dtype)
    for found in on_ranks(world_size, _stepped, True, dtype):
        for name in LAYERWISE:
            assert found[name] == pytest.approx(alone[name], rel=rel, abs=rel / 10)


@pytest.mark.parametrize("name", LAYERWISE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_16_bit_parameters_are_computed_in_32_bits(name: str, dtype: torch.dtype) -> None:
    """The norm of this gradient is 90,000, which float16 cannot hold. It must not stop the layer."""
    module = nn.Linear(300, 300, bias=False, dtype=dtype)
    nn.init.constant_(module.weight, 0.5)
    module.weight.grad = torch.full_like(module.weight, 300.0)
    settings = {"trust_coefficient": 0.25, "momentum": 0.0} if name == "lars" else {}
    make_optimizer(module, OptimizerConfig(name=name, **settings), 0.5).step()  # type: ignore[arg-type]
    moved = 0.5 - module.weight.detach().double()
    expected = 0.5 * (0.25 if name == "lars" else 1.0) * 0.5  # lr times the trust coefficient times the weight
    assert torch.allclose(moved, torch.tensor(expected, dtype=torch.float64), rtol=0.01)
