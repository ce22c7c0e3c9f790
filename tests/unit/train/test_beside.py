"""Looking for state beside the model disturbs nothing else in the process."""

import gc
import threading

import torch
from torch import nn

from undula.train.script_variables import StateBeside


def test_a_lazy_layer_beside_the_model_has_changed_once_it_has_weights() -> None:
    lazy = nn.LazyLinear(2)
    beside = StateBeside(nn.Linear(2, 2))
    assert beside.changed() is None
    lazy(torch.ones(1, 3))
    assert beside.changed() == "Linear.weight"


class Remembering(nn.Module):
    """Layer with two buffers that are not persistent: one that its forward pass changes, and one that it computes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("last", torch.zeros(2), persistent=False)
        self.register_buffer("mask", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask = torch.ones(2)
        y = self.layer(x + self.last)
        self.last.copy_(y.detach().mean(0))  # type: ignore[operator]
        return y  # type: ignore[no-any-return]


def test_a_buffer_that_no_state_has_is_named_if_its_values_change() -> None:
    model = nn.Sequential(Remembering())
    beside = StateBeside(model)
    assert beside.unsaved() is None
    model(torch.ones(1, 2))
    assert beside.unsaved() == "0.last"


def test_tuples_that_other_threads_are_building_are_left_alone() -> None:
    failures: list[BaseException] = []
    is_over = threading.Event()

    def build() -> None:
        try:
            while not is_over.is_set():
                assert len(tuple(each for each in range(1000))) == 1000
        except BaseException as failure:
            failures.append(failure)

    gc.unfreeze()  # so that looking takes long enough for the others to run
    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        StateBeside(nn.Linear(2, 2))
    is_over.set()
    for thread in threads:
        thread.join()
    gc.freeze()
    assert failures == []
