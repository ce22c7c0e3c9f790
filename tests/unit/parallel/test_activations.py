"""Tests of the activations that a model keeps: no policy changes any bit, and each keeps as little as it promises."""

import random
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.flop_counter import FlopCounterMode

from undula.errors import UsageError
from undula.parallel.activations import InHostMemory, keep_activations
from undula.parallel.recompute import Segment
from undula.parallel.spec import ActivationsSpec
from undula.parallel.units import units_of

sys.path.insert(0, str(Path(__file__).parents[3] / "jobs"))
from gpt import GPT, GPTConfig

POLICIES = {
    **{keep: ActivationsSpec(keep) for keep in ("none", "selective", "sqrt", "every_2", "every_3", "every_100")},
    **{f"{keep}, offloaded": ActivationsSpec(keep, offload=True) for keep in ("all", "none", "sqrt")},
}
WIDTH = 12


class Block(nn.Module):
    """A block with BatchNorm, dropout, noise of NumPy and `random`, and a buffer that a power iteration changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = spectral_norm(nn.Linear(WIDTH, 2 * WIDTH))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.up(self.norm(x))), 0.3, self.training)
        noise = torch.from_numpy(np.random.standard_normal(WIDTH).astype(np.float32)) * random.random()
        return x + scale * self.down(F.silu(hidden, inplace=True)) * noise


class Network(nn.Module):
    """Blocks that the forward pass iterates over, with something between them that no block sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(7))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = block(x, scale=self.scale)
            if place == 3:
                x.mul_(0.5)
        return self.out(F.dropout(x, 0.2, self.training))


class Attending(nn.Module):
    """A GPT with dropout, also in its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(layers=5, heads=2, width=16, context=8, dropout=0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.gpt((x[:, :8].abs() * 50).long())[..., 0]


class Images(nn.Module):
    """A residual network in stages, with units in several containers and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(nn.Sequential(Convolutions(), Convolutions()) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(x[:, None, None, :].expand(-1, 3, 4, -1)).mean((1, 2, 3))[:, None]


class Convolutions(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + x, inplace=True)


MODELS: dict[str, Callable[[], nn.Module]] = {"blocks": Network, "GPT": Attending, "images": Images}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads would mostly wait for each other on tensors as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def numbers_after(make: Callable[[], nn.Module], spec: ActivationsSpec, autocast: bool = False) -> dict[str, Any]:
    """Return everything that two passes with gradients leave: losses, gradients, buffers, and the next random numbers."""
    seed(1)
    module = make()
    undo = keep_activations(module, spec)
    names = list(module.state_dict())
    found: dict[str, Any] = {}
    for number in range(2):
        seed(number)
        x = torch.randn(6, WIDTH, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = module(x)
        output.float().square().mean().backward()
        found[f"output {number}"], found[f"gradient of x {number}"] = output.detach(), x.grad
        found[f"next {number}"] = torch.tensor([torch.rand(()).item(), random.random(), np.random.random()])
    found |= {name: each.grad for name, each in module.named_parameters()}
    found |= {name: each.clone() for name, each in module.named_buffers()}
    undo()
    assert list(module.state_dict()) == names
    assert not any("forward" in each.__dict__ for each in module.modules())
    return found


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    present = {name: value for name, value in expected.items() if value is not None}
    assert [name for name, value in present.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_changes_gradients_buffers_or_random_numbers(policy: str, model: str, autocast: bool) -> None:
    expected = numbers_after(MODELS[model], ActivationsSpec(), autocast)
    assert_same_bits(numbers_after(MODELS[model], POLICIES[policy], autocast), expected)


def test_a_second_backward_pass_through_the_same_graph_recomputes_again() -> None:
    gradients = []
    for spec in (ActivationsSpec(), ActivationsSpec("every_2"), ActivationsSpec("selective")):
        seed(1)
        module = Network()
        keep_activations(module, spec)
        loss = module(torch.randn(6, WIDTH)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append({name: each.grad for name, each in module.named_parameters()})
    for found in gradients[1:]:
        assert_same_bits(found, gradients[0])


def test_a_validation_keeps_and_recomputes_nothing() -> None:
    module = Network()
    keep_activations(module, ActivationsSpec("none"))
    with torch.no_grad():
        assert module.eval()(torch.ones(2, WIDTH)).grad_fn is None


@pytest.mark.parametrize("keep", ["none", "selective"])
def test_a_unit_that_does_something_else_when_it_is_recomputed_is_refused(keep: str) -> None:
    class Odd(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            square = x.outer(x)
            return (square.mm(square) if self.calls == 1 else square.double().inverse().float()).sin()[0]

    module = nn.Sequential(Odd(), Odd())
    keep_activations(module, ActivationsSpec(keep))
    with pytest.raises(UsageError, match="its forward pass must do the same"):
        module(torch.ones(3, requires_grad=True)).sum().backward()


class SavedBytes(saved_tensors_hooks):
    """Counts the bytes that are in memory for the backward pass, kept or recomputed, apart from parameters."""

    def __init__(self, module: nn.Module, monkeypatch: pytest.MonkeyPatch):
        super().__init__(self._keep, lambda tensor: tensor)
        self.now = self.most = 0
        self._known = {each.untyped_storage()._cdata for each in module.parameters()}
        record = Segment._record

        def record_and_count(segment: Segment, tensor: Tensor) -> Tensor:
            return record(segment, self._keep(tensor))

        monkeypatch.setattr(Segment, "_record", record_and_count)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return tensor

    def _freed(self, address: int, size: int) -> None:
        self._known.remove(address)
        self.now -= size


def saved_bytes(module: nn.Module, loss_of: Callable[[nn.Module], Tensor], spec: ActivationsSpec) -> tuple[int, int]:
    """Return the bytes that a forward pass keeps for the backward pass, and the most that are in memory for it at once."""
    undo = keep_activations(module, spec)
    with pytest.MonkeyPatch.context() as monkeypatch:
        saved = SavedBytes(module, monkeypatch)
        with saved:
            loss = loss_of(module)
        kept = saved.now
        loss.backward()
    undo()
    return kept, saved.most


def flops(module: nn.Module, loss_of: Callable[[nn.Module], Tensor], spec: ActivationsSpec) -> int:
    undo = keep_activations(module, spec)
    with FlopCounterMode(display=False) as counter:
        loss_of(module).backward()
    undo()
    return counter.get_total_flops()


def gpt_loss(module: nn.Module) -> Tensor:
    """Return the loss of two of the main job's samples."""
    text = torch.randint(256, (2, 256), generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(module(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def test_the_main_job_saves_60_to_80_percent_less_for_at_most_a_third_more_computation() -> None:
    """Of the bytes that a forward pass keeps, even less remain; the backward pass has those of one block in addition."""
    module = GPT(GPTConfig())
    kept, most = saved_bytes(module, gpt_loss, ActivationsSpec())
    assert kept == most
    kept_of_none, most_of_none = saved_bytes(module, gpt_loss, ActivationsSpec("none"))
    assert 0.2 <= most_of_none / most <= 0.4
    assert kept_of_none / kept <= 0.2
    computed = flops(module, gpt_loss, ActivationsSpec())
    for keep in ("none", "selective", "sqrt", "every_3"):
        assert computed <= flops(module, gpt_loss, ActivationsSpec(keep)) <= computed * 4 / 3


def layers_loss(module: nn.Module) -> Tensor:
    return module(torch.ones(4, WIDTH, requires_grad=True)).square().mean()


def test_sqrt_of_64_equal_layers_keeps_at_most_twice_eight() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(64)))
    _, most = saved_bytes(module, layers_loss, ActivationsSpec())
    kept_of_sqrt, most_of_sqrt = saved_bytes(module, layers_loss, ActivationsSpec("sqrt"))
    assert kept_of_sqrt <= 1.2 * 8 * most / 64
    assert most_of_sqrt <= 2.2 * 8 * most / 64
    assert flops(module, layers_loss, ActivationsSpec("sqrt")) <= flops(module, layers_loss, ActivationsSpec()) * 4 / 3


def test_offloaded_tensors_keep_their_strides() -> None:
    wide = torch.randn(4, 6, requires_grad=True)
    with InHostMemory():
        columns = wide.sin().T
        product = columns[::2].exp() * columns[1:2].expand(3, -1)
    node: Any = product.grad_fn
    saved, expected = (node._saved_self, node._saved_other), (columns[::2].exp(), columns[1:2].expand(3, -1))
    assert [each.stride() for each in saved] == [each.stride() for each in expected]
    assert all(map(torch.equal, saved, expected))
    assert node._saved_other.untyped_storage().data_ptr() != columns.untyped_storage().data_ptr()


SHARDED = ("all", "none", "sqrt")


def _sharded(rank: int, world_size: int) -> None:
    expected, *others = (local_parts(numbers_after(sharded_network, ActivationsSpec(keep))) for keep in SHARDED)
    for each in others:
        assert_same_bits(each, expected)


def local_parts(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in found.items()}


def sharded_network() -> nn.Module:
    module = Network()
    for block in module.blocks:
        fully_shard(block)
    return fully_shard(module)


def test_no_policy_changes_the_gradients_of_a_sharded_model() -> None:
    on_ranks(2, _sharded)


def test_units_are_the_repeated_blocks_or_those_that_a_job_names() -> None:
    assert list(units_of(Network(), "auto")) == [f"blocks.{number}" for number in range(7)]
    assert list(units_of(Images(), "auto")) == [f"stages.{a}.{b}" for a in range(2) for b in range(2)]
    assert list(units_of(Network(), ["blocks.[0-2]", "out", "blocks.1.up"])) == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "out",
    ]


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (
            ("blocks.*", "layers.*"),
            r"activations\.units has 'layers\.\*', which matches no module of the model; its modules are blocks, out and",
        ),
        ("auto", r"activations\.units=auto found no repeated blocks"),
    ],
)
def test_units_that_match_nothing_are_refused(units: Any, message: str) -> None:
    module = Network() if units != "auto" else nn.Linear(1, 1)
    with pytest.raises(UsageError, match=message):
        keep_activations(module, ActivationsSpec("none", units))
