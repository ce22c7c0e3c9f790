"""Tests of buffers and parameters that a forward pass changes: they end as on one rank with any division of the step, or are refused."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_scripts import ROWS, Counting
from numbers_job import cpu_run, network, numbers_job
from ranks import on_ranks
from torch import Tensor, nn

from undula.errors import UsageError
from undula.train.job import Job

pytestmark = pytest.mark.usefixtures("process_group")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.move(x)
        return self.net(x / ROWS)  # type: ignore[no-any-return]

    def move(self, x: Tensor) -> None:
        """Change what the test is about."""


class Queue(Base):
    """A ring of features that the forward pass writes, as MoCo has it."""

    name = "queue_ptr"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(24))
        self.register_buffer(self.name, torch.zeros(1, dtype=torch.long))

    def move(self, x: Tensor) -> None:
        place = self.get_buffer(self.name)
        self.queue[(torch.arange(len(x)) + place) % len(self.queue)] = x.flatten()
        place[0] = (int(place) + len(x)) % len(self.queue)


class UnnamedQueue(Queue):
    name = "place"


class LastMask(Base):
    """Flags that the last micro-batch sets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(ROWS, dtype=torch.bool))

    def move(self, x: Tensor) -> None:
        self.last = torch.zeros(ROWS, dtype=torch.bool).index_fill(0, x.long().flatten(), True)


class LastFlag(Base):
    """One flag that the last micro-batch sets, on in some steps and off in others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros((), dtype=torch.bool))

    def move(self, x: Tensor) -> None:
        self.last.fill_((x < ROWS / 4).any())


class Maximum(Base):
    """The largest sample so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row_max", torch.zeros((), dtype=torch.int64))

    def move(self, x: Tensor) -> None:
        self.row_max = torch.maximum(self.row_max, x.max().long())


class Level(Base):
    """A small unsigned integer that each micro-batch sets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.full((2,), 99, dtype=torch.uint8))

    def move(self, x: Tensor) -> None:
        self.level.fill_(int(x.max()))


class Quantized(Base):
    """Integer weights, which no count would have so many of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.ones(2**20 + 1, dtype=torch.uint8))
        self.changes = False

    def move(self, x: Tensor) -> None:
        if self.changes:
            self.weights[0] += 1


class Sized(Base):
    """A count of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))

    def move(self, x: Tensor) -> None:
        self.samples += len(x)


class Resized(Base):
    """A buffer that the forward pass replaces by one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(5))

    def move(self, x: Tensor) -> None:
        self.last = torch.zeros(1)


class Moving(Base):
    """A frozen network, and a function that the forward pass calls."""

    def __init__(self, change: Callable[["Moving"], Any]) -> None:
        super().__init__()
        self.other = network().requires_grad_(False)
        self.words = nn.Embedding(ROWS, 2, max_norm=0.1)
        self.change = change

    def move(self, x: Tensor) -> None:
        self.change(self)


def trained(
    rank: int, world_size: int, job: Job, make: Callable[[], nn.Module], scale: float = 1.0
) -> dict[str, Any] | str:
    """Train on samples divided by `scale`, and return the model's state or the message of a refusal."""
    run = cpu_run(job, rank, world_size)
    model = run.model(make())
    run.optimizer(torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1))
    try:
        for step in run.steps():
            for batch in step.batches():
                step.backward(model(batch["x"][:, None] / scale).square().mean())
            step.update()
    except UsageError as error:
        return str(error)
    finally:
        run.free()
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("virtual_workers", [1, 2, 4])
def test_counts_and_flags_are_those_of_all_micro_batches(tmp_path: Path, virtual_workers: int) -> None:
    """With one virtual worker, a step has one micro-batch, so that its buffers are those of the script's own forward pass."""
    state = trained(0, 1, numbers_job(tmp_path, virtual_workers=virtual_workers), Counting, scale=ROWS)
    assert isinstance(state, dict)
    expected = {
        "norm.num_batches_tracked": 4,
        "residues": [12] * 4,
        "small": [200 + 12] * 4,
        "samples": 48,
        "steps": [4],
        "seen": [True] * ROWS,
        "unseen": [False] * ROWS,
        "toggled": False,
        "mask": (torch.eye(3) > 0).tolist(),
    }
    assert {name: state[name] for name in expected} == expected
    assert 0 <= state["least"] < 1 / 4


REFUSED: dict[Callable[[], nn.Module], str] = {
    Queue: "the integer buffer 'queue_ptr'",
    UnnamedQueue: "the integer buffer 'place'",
    LastMask: "the Boolean buffer 'last' both on and off",
    LastFlag: "the Boolean buffer 'last' both on and off",
    Maximum: "the integer buffer 'row_max'",
    Level: "the integer buffer 'level'",
}


def messages_of(rank: int, world_size: int, job: Job, makes: Sequence[Callable[[], nn.Module]]) -> list[Any]:
    """Train a run of each model, and return the messages of their refusals."""
    return [
        trained(rank, world_size, replace(job, run_url=f"{job.run_url}-{number}"), make)
        for number, make in enumerate(makes)
    ]


def test_changes_that_cannot_be_combined_are_refused_by_every_rank(tmp_path: Path) -> None:
    for messages in on_ranks(2, messages_of, numbers_job(tmp_path), list(REFUSED)):
        for message, named in zip(messages, REFUSED.values(), strict=True):
            assert named in message
            assert "change the buffer after step.update()" in message


def test_large_integer_buffers_must_not_change(tmp_path: Path) -> None:
    def changing() -> nn.Module:
        model = Quantized()
        model.changes = True
        return model

    assert isinstance(trained(0, 1, numbers_job(tmp_path), Quantized), dict)
    assert "the forward pass changed the buffer 'weights'" in trained(0, 1, numbers_job(tmp_path / "b"), changing)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_buffer_without_arithmetic_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    def make() -> nn.Module:
        model = Base()
        model.register_buffer("scales", torch.ones(3).to(dtype))
        return model

    state = trained(0, 1, numbers_job(tmp_path), make)
    assert isinstance(state, dict)
    assert state["scales"] == [1.0] * 3


def test_a_count_that_may_be_of_steps_or_of_samples_is_refused(tmp_path: Path) -> None:
    found = trained(0, 1, numbers_job(tmp_path, global_batch=4), Sized)
    assert "may count steps as well as samples" in found


@pytest.mark.parametrize("make", REFUSED)
def test_the_only_micro_batch_of_a_step_may_change_its_buffers_at_will(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    state = trained(0, 1, numbers_job(tmp_path, virtual_workers=1), make)
    assert isinstance(state, dict)
    if make is Queue:
        assert (len(set(state["queue"])), state["queue_ptr"]) == (24, [0])


def test_a_buffer_that_changes_its_shape_is_refused(tmp_path: Path) -> None:
    assert "replaced the buffer 'last' of shape (5,) by a tensor of shape (1,)" in trained(
        0, 1, numbers_job(tmp_path), Resized
    )


class Late(Base):
    persistent = True

    def move(self, x: Tensor) -> None:
        if "mask" not in self._buffers:
            self.register_buffer("mask", torch.ones(3), persistent=self.persistent)


class LateCache(Late):
    persistent = False


def test_a_persistent_buffer_that_the_forward_pass_registers_is_refused(tmp_path: Path) -> None:
    makes = [Late, LateCache]
    refused, cached = messages_of(0, 1, numbers_job(tmp_path), makes)
    assert "the forward pass registered the buffer 'mask', which a resumed run would lack" in refused
    assert "mask" not in str(cached)


def _new_tensors(model: Moving) -> None:
    for own, other in zip(model.net.parameters(), model.other.parameters(), strict=True):
        other.data = 0.9 * other.data + 0.1 * own.data


def _in_place(model: Moving) -> None:
    torch._foreach_lerp_(list(model.other.parameters()), list(model.net.parameters()), 0.1)


def _without_a_trace(model: Moving) -> None:
    for own, other in zip(model.net.parameters(), model.other.parameters(), strict=True):
        other.data.mul_(0.9).add_(own.data, alpha=0.1)


def _normalized(model: Moving) -> None:
    model.words(torch.tensor([1, 2]))


def _initialized(model: Moving) -> None:
    model.net[0].bias.data.fill_(1.0)  # type: ignore[operator, union-attr]


MOVED: dict[Callable[[Moving], Any], str] = {
    _new_tensors: "a parameter or the state of the optimizer",
    _in_place: "the parameter 'other.0.weight'",
    _without_a_trace: "a parameter or the state of the optimizer",
    _normalized: "the parameter 'words.weight'",
    _initialized: "a parameter or the state of the optimizer",
}


def test_a_forward_pass_that_changes_parameters_is_refused_by_every_rank(tmp_path: Path) -> None:
    makes, job = [partial(Moving, change) for change in MOVED], numbers_job(tmp_path)
    alone = messages_of(0, 1, replace(job, run_url=f"{tmp_path}/alone"), makes)
    for messages in (alone, *on_ranks(2, messages_of, job, makes)):
        for message, name in zip(messages, MOVED.values(), strict=True):
            assert f"{name} changed " in message
            assert " in the forward pass" in message


def test_weights_that_move_to_other_addresses_are_no_change(tmp_path: Path) -> None:
    def move(model: Moving) -> None:
        for each in model.recurrent.parameters():  # type: ignore[union-attr]
            each.data = each.data.clone()  # as flatten_parameters() does on a GPU

    def make() -> nn.Module:
        module = Moving(move)
        module.recurrent = nn.LSTM(1, 2)
        return module

    assert isinstance(trained(0, 1, numbers_job(tmp_path), make), dict)
