"""Looking for state beside the model disturbs nothing else in the process."""

import gc
import threading

from torch import nn

from undula.train.beside import StateBeside


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
