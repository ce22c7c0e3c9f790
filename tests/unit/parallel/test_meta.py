"""Tests of modules on the meta device: what their layers draw, and what nothing fills and is refused."""

from collections.abc import Callable
from typing import Any

import engine_steps
import pytest
import torch
from numbers_job import CPU
from torch import Tensor, nn

from undula.errors import UsageError
from undula.parallel.materialize import materialize
from undula.parallel.spec import ShardingSpec
from undula.state.model_state import model_shapes
from undula.train.single_process import local_world

Fill = Callable[[Any], object]


class Layer(nn.Module):
    """Layer with a weight and a buffer."""

    def __init__(self, buffer: Callable[[], Tensor], fill: Fill, persistent: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 6))
        self.register_buffer("buffer", buffer(), persistent=persistent)
        self.fill = fill
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.fill(self)


class Net(nn.Module):
    """Units of one layer, and a layer beside them."""

    def __init__(self, buffer: Callable[[], Tensor], fill: Fill, persistent: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(buffer, fill, persistent) for _ in range(2))
        self.last = nn.Linear(6, 1)


def nothing(layer: Any) -> None:
    """Fill nothing."""


def a_part(layer: Any) -> None:
    layer.buffer[:-1].zero_()


def in_numpy(layer: Any) -> None:
    if not layer.buffer.is_meta:
        layer.buffer.numpy()[:] = 3


def anew(layer: Any) -> None:
    layer.buffer = torch.ones_like(layer.buffer, device=None if layer.buffer.is_meta else "cpu")


def on_meta(layer: Any) -> None:
    layer.buffer = torch.ones(layer.buffer.shape, dtype=layer.buffer.dtype, device="meta")


def scaled(layer: Any) -> None:
    """Compute with what the memory has."""
    layer.buffer.mul_(2)


def of(dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: torch.ones(5, dtype=dtype)


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.float8_e4m3fn),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]  # fmt: skip
UNFILLED = {
    **{f"{dtype}": (of(dtype), nothing) for dtype in DTYPES},
    **{f"a part of {dtype}": (of(dtype), a_part) for dtype in DTYPES},
    "a scalar": (lambda: torch.tensor(3), nothing),
    "a result of the memory": (of(torch.float32), scaled),
    "anew, on the meta device": (of(torch.float32), on_meta),
}
FILLED: dict[str, tuple[Callable[[], Tensor], Fill]] = {
    **{f"{dtype}": (of(dtype), lambda layer: layer.buffer.zero_()) for dtype in DTYPES},
    "of .data": (of(torch.float32), lambda layer: layer.buffer.data.fill_(2)),
    "NaN": (of(torch.float32), lambda layer: layer.buffer.fill_(float("nan"))),
    "minus one": (of(torch.int64), lambda layer: layer.buffer.fill_(-1)),
    "255": (of(torch.uint8), lambda layer: layer.buffer.fill_(255)),
    "random bytes": (lambda: torch.ones(4096, dtype=torch.int8), lambda layer: layer.buffer.random_()),
    "in NumPy": (of(torch.int64), in_numpy),
    "anew": (of(torch.float32), anew),
    "empty": (lambda: torch.ones(0), nothing),
}


def placed(module: nn.Module, stage: int = 3) -> nn.Module:
    """Place a module on one rank in a stage."""
    with local_world(CPU):
        engine = engine_steps.placed(module, 0, 1, 4, sharding=ShardingSpec(stage))  # type: ignore[arg-type]
        return engine.module


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("name", UNFILLED)
def test_a_buffer_that_nothing_fills_is_named(name: str, persistent: bool) -> None:
    with torch.device("meta"):
        module = Net(*UNFILLED[name], persistent)
    with pytest.raises(UsageError, match=r"with 'blocks\.0\.buffer', which no reset_parameters\(\) fills, or not all"):
        placed(module)


@pytest.mark.parametrize("name", FILLED)
def test_a_buffer_that_reset_parameters_fills_has_its_values(name: str) -> None:
    with torch.device("meta"):
        module = Net(*FILLED[name])
    torch.manual_seed(0)
    expected = Layer(*FILLED[name], True).buffer
    found = placed(module).blocks[0].buffer  # type: ignore[union-attr,index]
    assert found.dtype == expected.dtype
    if name != "random bytes":
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_values_are_those_of_one_draw_although_a_suspect_is_drawn_twice() -> None:
    weights = []
    for fill in (lambda layer: layer.buffer.fill_(-1), lambda layer: layer.buffer.fill_(1)):
        with torch.device("meta"):
            module = Net(of(torch.int64), fill)
        torch.manual_seed(0)
        weights.append(placed(module).state_dict()["blocks.1.weight"].full_tensor().tolist())
    assert weights[0] == weights[1]


class Partial(nn.Module):
    """Layer that draws one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(3, 3)), nn.Parameter(torch.zeros(3))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


def test_a_parameter_that_nothing_fills_is_named() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), Partial())
    with pytest.raises(UsageError, match=r"with '1\.bias', which no reset_parameters\(\) fills"):
        placed(module)


class Table(nn.Linear):
    """Layer with a table in an attribute."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.tables = [torch.arange(3.0)]


def test_a_table_in_an_attribute_is_named() -> None:
    with torch.device("meta"):
        module = nn.Sequential(Table())
    with pytest.raises(UsageError, match=r"with '0\.tables', which is neither a parameter nor a buffer"):
        placed(module)


class Outer(nn.Module):
    """Layer that changes what an inner one has drawn, as its constructor does."""

    def __init__(self, inner: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.inner = inner
        self.layer = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.constant_(self.get_submodule(self.inner).weight, 7.0)


def test_an_outer_layer_changes_what_an_inner_one_has_drawn() -> None:
    with torch.device("meta"):
        module = Outer("layer")
    weight = placed(module).state_dict()["layer.weight"].full_tensor()
    assert weight.unique().tolist() == [7.0]


def test_an_outer_layer_that_changes_a_unit_is_refused() -> None:
    """The unit is sharded already, and draws of shards depend on the number of workers."""
    with torch.device("meta"):
        module = Outer("blocks.1")
    with pytest.raises(UsageError, match=r"with 'blocks\.1\.weight', which is drawn in a unit of its own"):
        placed(module)


def test_tensors_that_are_not_on_the_meta_device_keep_their_values() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1] = nn.Linear(3, 3)
    module[0].register_buffer("table", torch.arange(3))
    expected = module[1].weight.detach().clone()
    state = placed(module, 1).state_dict()
    assert torch.equal(state["1.weight"].full_tensor(), expected)
    assert state["0.table"].tolist() == [0, 1, 2]


def test_what_nothing_fills_is_named_without_values() -> None:
    """As in a count on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for fill, is_refused in ((nothing, True), (lambda layer: layer.buffer.data.fill_(2), False), (anew, False)):
        with torch.device("meta"):
            module = Net(of(torch.float32), fill)
        with FakeTensorMode(allow_non_fake_inputs=True):
            if is_refused:
                with pytest.raises(UsageError, match=r"'blocks\.0\.buffer', 'blocks\.1\.buffer', which no reset_para"):
                    materialize(module, module.modules(), CPU, has_values=False)
            else:
                materialize(module, module.modules(), CPU, has_values=False)
                assert model_shapes(module)
