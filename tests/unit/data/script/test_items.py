"""Tests that a micro-batch of a script's dataset depends on its samples alone, not on the process that loads it or the world size."""

import random
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_data import ROWS, Drawn, DrawnAtOnce, with_noise
from torch.utils.data import Subset

from undula.data.script.items import Items, requests
from undula.data.script.loader_processes import Loader
from undula.data.script.reader import ScriptReader
from undula.plan.plan import Plan, PlanSpec
from undula.plan.tree import assign

SPEC = PlanSpec(global_batch=12, virtual_workers=4, micro_batch=2, epochs=2)
PLAN = Plan(SPEC, ROWS)
Found = dict[tuple[int, int, int], list[Any]]
"""Values of each micro-batch, by (step, virtual worker, number)."""


def loaded(dataset: Any, num_workers: int = 0, world_size: int = 1, start: int = 0, plan: Plan = PLAN) -> Found:
    """Load the micro-batches of a plan on ranks one after another."""
    items, found = Items(dataset, with_noise), {}
    for virtual_workers in assign(plan.spec.virtual_workers, world_size):
        loader = Loader(num_workers)
        stream = ScriptReader(items, loader, plan, virtual_workers, start, "training")
        steps = range(start, plan.total_steps)
        for each in chain.from_iterable(plan.work(range(step, step + 1), virtual_workers) for step in steps):
            taken = stream.take(each.virtual_worker, each.samples)
            assert taken.batch["index"].tolist() == taken.ids.tolist()
            values = [taken.batch[name].flatten().tolist() for name in sorted(taken.batch)]
            found[each.step, each.virtual_worker, each.number] = values
        loader.close()
    return found


def test_steps_that_workers_merge_are_loaded_one_virtual_worker_after_another() -> None:
    plan = Plan(replace(PLAN.spec, batch="elastic"), ROWS)
    alone, merged = (list(requests(plan, range(4), 0, "training", world_size)) for world_size in (1, 2))
    assert plan.optimizer_step(0, 2).merged_steps == 2
    work = plan.work(range(2), range(4))
    assert [(each.virtual_worker, each.step) for each in work] == sorted(
        (each.virtual_worker, each.step) for each in work
    )
    by_place = {
        (each.step, each.virtual_worker, each.number): request for each, request in zip(work, merged, strict=False)
    }
    in_steps = [each for step in (0, 1) for each in plan.work(range(step, step + 1), range(4))]
    for each, request in zip(in_steps, alone, strict=False):
        assert by_place[each.step, each.virtual_worker, each.number].ids.tolist() == request.ids.tolist()
    assert sorted(each.collate_key for each in merged) == sorted(each.collate_key for each in alone)


def test_the_size_of_a_pickled_dataset_is_known_without_making_it(tmp_path: Path) -> None:
    np.save(tmp_path / "mapped.npy", np.zeros(10**5))
    mapped = np.load(tmp_path / "mapped.npy", mmap_mode="r")
    held, on_disk = Items([torch.zeros(10**5), np.ones(10**5), b"text" * 10**5, "x"]), Items(mapped)
    for items in (held, on_disk):
        assert items.pickled_bytes() == len(items.dumps())
    assert held.pickled_bytes() > 16 * 10**5
    assert on_disk.pickled_bytes() < 10**4, "each process maps the file"


def test_each_epoch_has_every_sample_once() -> None:
    ids = [request.ids for request in requests(PLAN, range(4), 0, "training")]
    assert np.bincount(np.concatenate(ids)).tolist() == [2] * ROWS


@pytest.mark.parametrize(
    "dataset", [Drawn(), DrawnAtOnce(), Subset(Drawn(), range(ROWS))], ids=lambda each: type(each).__name__
)
def test_what_is_drawn_depends_neither_on_the_process_nor_on_the_world_size(dataset: Any) -> None:
    alone = loaded(dataset)
    assert len(alone) == len(PLAN.work(range(PLAN.total_steps), range(4)))
    assert loaded(dataset, world_size=3) == alone
    later = loaded(dataset, num_workers=1, start=7)
    assert later == {place: values for place, values in alone.items() if place[0] >= 7}


@pytest.mark.parametrize("dataset", [Drawn(), Subset(Drawn(), range(ROWS))], ids=lambda each: type(each).__name__)
def test_augmentation_is_keyed_by_seed_epoch_and_index(dataset: Any) -> None:
    def of_samples(**changes: Any) -> dict[tuple[int, int], float]:
        """Return the number of each sample by (epoch, index)."""
        plan = Plan(PlanSpec(**{"global_batch": 12, "virtual_workers": 4, "epochs": 2, **changes}), ROWS)
        return {
            (step // plan.steps_per_epoch, index): number
            for (step, *_), (indices, _, numbers, *_) in loaded(dataset, plan=plan).items()
            for index, number in zip(indices, numbers, strict=True)
        }

    found = of_samples()
    assert len(set(found.values())) == len(found) == 2 * ROWS
    assert of_samples(micro_batch=1, global_batch=24, virtual_workers=3, shuffle="none") == found
    assert of_samples(seed=1).items().isdisjoint(found.items())


def test_what_a_collate_function_draws_is_keyed_by_the_micro_batch() -> None:
    noise = [values[1][0] for values in loaded(Drawn()).values()]
    assert len(set(noise)) == len(noise)


def test_training_and_validation_draw_different_numbers() -> None:
    first, other = (next(requests(PLAN, range(4), 0, purpose)) for purpose in ("training", "validation"))
    assert first.ids.tolist() == other.ids.tolist()
    assert first.sample_keys.tolist() != other.sample_keys.tolist()
    assert first.collate_key != other.collate_key


def test_loading_in_the_rank_leaves_the_random_numbers_of_the_script_alone() -> None:
    def drawn() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), np.random.rand()

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = [drawn() for _ in range(3)]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    items = Items(Drawn(), with_noise)
    stream = ScriptReader(items, Loader(0), PLAN, range(4), 0, "training")
    found = []
    for load in (stream.open, lambda: stream.take(0, 2), lambda: stream.any_rows(2)):
        load()
        found.append(drawn())
    assert found == expected


def test_arbitrary_rows_are_repeated_if_there_are_too_few() -> None:
    items = Items(Drawn(3))
    stream = ScriptReader(
        items, Loader(0), Plan(PlanSpec(global_batch=2, virtual_workers=1), 3), range(1), 0, "training"
    )
    assert stream.any_rows(5).batch["index"].tolist() == [0, 1, 2, 0, 1]


def test_a_dataset_of_hugging_face_is_read_from_disk_with_its_transform(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"index": list(range(ROWS)), "x": [float(index) for index in range(ROWS)]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path)

    def transform(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"index": rows["index"], "x": [torch.tensor([value]) + torch.rand(1) for value in rows["x"]]}

    dataset = datasets.load_from_disk(tmp_path).with_transform(transform)
    assert len(Items(dataset).dumps()) < 20_000  # its rows stay on the disk
    assert loaded(dataset, num_workers=1) == loaded(dataset, world_size=3)


class Broken(Drawn):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise ValueError("no such image")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_dataset_is_raised_as_it_is_with_the_samples(num_workers: int) -> None:
    loader = Loader(num_workers)
    loader.begin(Items(Broken()), requests(PLAN, range(4), 0, "training"))
    with pytest.raises(ValueError, match="no such image") as caught:
        loader.next()
    loader.close()
    ids = next(requests(PLAN, range(4), 0, "training")).ids.tolist()
    assert f"one of the samples {ids}" in str(caught.value) + str(getattr(caught.value, "__notes__", ""))
