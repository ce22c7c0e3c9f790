"""Looking for state beside the model disturbs nothing else in the process."""

import gc
import threading

import torch
from torch import nn

from undula.train.beside import StateBeside


def test_a_lazy_layer_beside_the_model_has_changed_once_it_has_weights() -> None:
    lazy = nn.LazyLinear(2)
    beside = StateBeside(nn.Linear(2, 2))
    assert beside.changed() is None
    lazy(torch.ones(1, 3))
    assert beside.changed() == "Linear.weight"


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
