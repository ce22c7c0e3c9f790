"""Tests of loader processes: they serve one group after another, are replaced if they are lost, and never outlive their rank."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from drawn_data import ROWS, Drawn, with_noise
from torch import nn
from torch.utils.data import Dataset
from waiting import wait_until

from undula.data.script.items import Items, requests
from undula.data.script.loader_processes import MOST_LOSSES, Loader
from undula.data.script.reader import ScriptReader
from undula.errors import UsageError
from undula.masking.values import declare, mask
from undula.plan.plan import Plan, PlanSpec
from undula.state.processes import is_alive, send_signal

PLAN = Plan(PlanSpec(global_batch=12, virtual_workers=4, micro_batch=2, epochs=2), ROWS)
LIMIT_S = 60.0


@pytest.fixture
def loader() -> Iterator[Loader]:
    made = Loader(num_workers=2)
    yield made
    made.close()


def processes_of(loader: Loader) -> list[psutil.Process]:
    """Return the loader processes of this process. Other children of it, such as ranks of other tests, have ended."""
    return [psutil.Process(child.pid) for child in multiprocessing.active_children()]


def from_step(loader: Loader, step: int = 0, dataset: Any = None, collate: Any = with_noise) -> list[int]:
    """Begin to load at a step, and return the keys of the micro-batches to come."""
    items = Items(dataset or Drawn(), collate)
    loader.begin(items, requests(PLAN, range(4), step, "training"))
    return [request.collate_key for request in requests(PLAN, range(4), step, "training")]


def test_the_same_processes_serve_the_next_group(loader: Loader) -> None:
    from_step(loader)
    for _ in range(5):
        loader.next()
    before = processes_of(loader)
    assert len(before) == 2
    keys = from_step(loader, 3)
    assert [loader.next()[0].collate_key for _ in keys] == keys
    assert processes_of(loader) == before


class Marked(Drawn):
    """Dataset whose samples have a mark."""

    def __init__(self, mark: int) -> None:
        super().__init__()
        self.mark = mark

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": self.mark, "x": torch.zeros(1)}


def marks(loader: Loader, count: int) -> set[int]:
    return {mark for _ in range(count) for mark in loader.next()[1]["index"].tolist()}


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_the_same_processes_get_a_dataset_that_changes(loader: Loader, taken: int) -> None:
    dataset = Marked(1)
    keys = from_step(loader, dataset=dataset)
    assert marks(loader, taken) <= {1}
    before = processes_of(loader)
    dataset.mark = 2
    loader.renew()
    assert marks(loader, 7) == {2}
    assert loader.next()[0].collate_key == keys[taken + 7]
    from_step(loader, dataset=Marked(3))
    assert marks(loader, 1) == {3}
    send_signal(before[0], signal.SIGKILL)
    wait_until(lambda: not is_alive(before[0]))
    assert marks(loader, 7) == {3}


def test_a_process_that_replaces_a_lost_one_gets_the_dataset_of_the_epochs_first_batch(loader: Loader) -> None:
    dataset = Marked(1)
    from_step(loader, dataset=dataset)
    assert marks(loader, 1) == {1}
    dataset.mark = 2  # too late for this epoch
    dataset.file = threading.Lock()
    lost = processes_of(loader)[0]
    send_signal(lost, signal.SIGKILL)
    wait_until(lambda: not is_alive(lost))
    assert marks(loader, 7) == {1}
    del dataset.file
    loader.renew()
    assert marks(loader, 7) == {2}


def test_a_dataset_that_can_no_longer_be_sent_when_an_epoch_begins_is_refused(loader: Loader) -> None:
    dataset = Marked(1)
    from_step(loader, dataset=dataset)
    dataset.mark, dataset.file = 2, threading.Lock()
    with pytest.raises(UsageError, match=r"cannot be sent to loader processes \(.*lock.*\); .* __getstate__"):
        loader.renew()
    with pytest.raises(UsageError, match=r"cannot be sent to loader processes"):
        from_step(loader, dataset=dataset)


class Opening(Drawn):
    """Dataset that opens a file on its first sample, which cannot be pickled any more."""

    file: Any = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.file = threading.Lock()
        return super().__getitem__(index)


def test_a_rank_without_samples_leaves_the_dataset_as_the_next_epoch_sends_it(loader: Loader) -> None:
    items = Items(Opening(), with_noise)
    reader = ScriptReader(items, loader, PLAN, range(4), 0, "training")
    for size in (2, 1):
        assert reader.any_rows(2).batch["index"].tolist() == [0, 1]
        reader.take(0, size)
        loader.renew()


copies: list[int] = []
"""Processes in which the dataset of the next test was unpickled."""


class Counting(Drawn):
    def __setstate__(self, state: Any) -> None:
        self.__dict__ = state
        copies.append(os.getpid())


def test_a_rank_without_samples_copies_the_dataset_once_and_gets_its_batch_as_new_in_each_step(loader: Loader) -> None:
    copies.clear()
    reader = ScriptReader(Items(Counting(), None), loader, PLAN, range(0), 0, "training")
    for _ in range(3):
        batch = reader.any_rows(2).batch
        assert batch.pop("index").tolist() == [0, 1]
        batch["x"].fill_(torch.nan)
    assert not torch.isnan(reader.any_rows(2).batch["x"]).any()
    assert copies == [os.getpid()]


class Collate:
    """Collate function that holds a model, as those of sequence-to-sequence models do."""

    def __init__(self) -> None:
        self.model = nn.Linear(1000, 1000)

    def __call__(self, samples: list[Any]) -> tuple[str, torch.Size, int]:
        weight = self.model.weight
        return weight.device.type, weight.shape, os.getpid()


def test_a_model_that_trains_reaches_the_processes_without_its_weights_and_does_not_replace_them(
    loader: Loader,
) -> None:
    collate = Collate()
    from_step(loader, collate=collate)
    first = loader.next()[1]
    with torch.no_grad():
        collate.model.weight.add_(1)
    from_step(loader, collate=collate)
    assert loader.next()[1][:2] == first[:2] == ("meta", torch.Size([1000, 1000]))
    assert len(Items(Drawn(), collate).dumps()) < 10_000


def test_a_file_that_is_mapped_into_memory_is_not_copied(loader: Loader, tmp_path: Path) -> None:
    np.arange(100_000).tofile(tmp_path / "tokens.bin")
    dataset: Any = Drawn()
    dataset.tokens = np.memmap(tmp_path / "tokens.bin", np.int64, "r", offset=80, shape=(10, 100))
    dumped = Items(dataset).dumps()
    assert len(dumped) < 10_000
    assert np.array_equal(pickle.loads(dumped)[0].tokens, dataset.tokens)


class Mapped(Drawn):
    """Dataset whose samples are in a file that it maps into memory."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.map()

    def map(self) -> None:
        self.tokens = np.memmap(self.file, np.int64, "r")

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": self.tokens[index], "x": torch.zeros(1)}

    def replace_file(self, value: int) -> None:
        np.full(ROWS, value).tofile(self.file.with_suffix(".new"))
        self.file.with_suffix(".new").replace(self.file)


@pytest.fixture
def mapped(tmp_path: Path) -> Mapped:
    np.full(ROWS, 1).tofile(tmp_path / "tokens.bin")
    return Mapped(tmp_path / "tokens.bin")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_that_is_replaced_and_mapped_again_between_epochs_is_read(mapped: Mapped, num_workers: int) -> None:
    loader = Loader(num_workers)
    from_step(loader, dataset=mapped)
    assert marks(loader, 5) == {1}
    mapped.replace_file(2)
    mapped.map()
    loader.renew()
    assert marks(loader, 5) == {2}
    loader.close()


def test_a_file_that_is_replaced_but_not_mapped_again_is_refused(loader: Loader, mapped: Mapped) -> None:
    from_step(loader, dataset=mapped)
    assert marks(loader, 5) == {1}
    mapped.replace_file(2)
    assert marks(loader, 5) == {1}
    with pytest.raises(UsageError, match=r"tokens.bin was replaced after the dataset had mapped it; map it again"):
        loader.renew()
    lost = processes_of(loader)[0]
    send_signal(lost, signal.SIGKILL)
    wait_until(lambda: not is_alive(lost))
    with pytest.raises(UsageError, match=r"tokens.bin was replaced after the dataset had mapped it; map it again"):
        marks(loader, 5)


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_no_micro_batch_is_lost_or_repeated_when_a_process_is_killed(loader: Loader, taken: int) -> None:
    alone = Loader(num_workers=0)
    keys = from_step(loader)
    from_step(alone)
    for place, key in enumerate(keys[:20]):
        if place == taken:
            send_signal(processes_of(loader)[0], signal.SIGKILL)
        (request, batch), (_, expected) = loader.next(), alone.next()
        assert request.collate_key == key
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


class Talkative(Drawn):
    """Dataset that raises what its process shows of a secret."""

    def __getitem__(self, index: int) -> Any:
        raise KeyError(f"shown: {mask('of-no-shape')}")


def test_loader_processes_know_the_secrets_of_their_rank(loader: Loader) -> None:
    declare({"PHRASE": "of-no-shape"})  # after the fork server has started
    from_step(loader, dataset=Talkative())
    with pytest.raises(KeyError, match=r"shown: \*\*\*"):
        loader.next()


class Fatal(Drawn):
    """Dataset with a sample that ends its process."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 40 and multiprocessing.parent_process() is not None:
            os._exit(7)
        return super().__getitem__(index)


@pytest.mark.nightly
def test_a_sample_that_ends_every_process_ends_the_run_with_its_name() -> None:
    loader = Loader(num_workers=1)
    keys = from_step(loader, dataset=Fatal())
    sentence = rf"ended {MOST_LOSSES + 1} times in a row with exit status 7 while they loaded the samples \[.*\b40\b"
    with pytest.raises(UsageError, match=sentence):
        assert [loader.next() for _ in keys]
    loader.close()


def test_closing_ends_the_processes(loader: Loader) -> None:
    from_step(loader)
    loader.next()
    before = processes_of(loader)
    loader.close()
    wait_until(lambda: not any(is_alive(process) for process in before))


def test_classes_and_functions_of_the_script_itself_reach_the_processes() -> None:
    """In a worker, those of the script's `__main__` can only be pickled by value, like these."""

    class Local(Dataset[int]):
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> int:
            return index

    loader = Loader(num_workers=1)
    from_step(loader, dataset=Local(), collate=lambda samples: sum(samples))
    request, batch = loader.next()
    assert batch == request.ids.sum()
    loader.close()


def test_a_dataset_that_cannot_be_pickled_is_refused_with_the_fix() -> None:
    dataset: Any = Drawn()
    dataset.file = threading.Lock()
    loader = Loader(num_workers=1)
    with pytest.raises(
        UsageError, match=r"cannot be sent to loader processes \(.*lock.*\); open files .* on the first sample"
    ):
        from_step(loader, dataset=dataset)


RANK = """
from drawn_data import ROWS, Drawn
from undula.data.script.items import Items, requests
from undula.data.script.loader_processes import Loader
from undula.plan.plan import Plan, PlanSpec
import multiprocessing, time

if __name__ == "__main__":
    loader = Loader(2)
    loader.begin(Items(Drawn()), requests(Plan(PlanSpec(global_batch=12, virtual_workers=4), ROWS), range(4), 0, "training"))
    loader.next()
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(600)
"""


def test_the_processes_end_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    path = [str(Path(__file__).parents[3]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env) as rank:
        assert rank.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
        assert len(processes) == 2
        rank.kill()
    wait_until(lambda: not any(is_alive(process) for process in processes))
