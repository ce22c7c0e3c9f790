"""Tests of the datasets that a script may pass to a run, and of the sentences that refuse the others."""

from collections.abc import Iterator
from typing import Any

import pytest
from drawn_data import ROWS, Drawn, DrawnAtOnce
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from undula.data.script.dataset import REPLACEMENTS, reads_several, script_data
from undula.data.script.indexed import IndexedData, ScriptData, recorded_data
from undula.errors import SpecError, UsageError
from undula.plan.plan import PlanSpec


def found(dataset: object, **arguments: Any) -> ScriptData:
    values: dict[str, Any] = {"validation": None, "name": None, "num_workers": 0, "loader_arguments": {}}
    return script_data(dataset, **{**values, **arguments})


class Endless(IterableDataset[int]):
    """Iterable dataset of torch."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])


class Foreign:
    """Iterable dataset of another library."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])


class WithoutLength(Dataset[int]):
    """Map-style dataset whose length is not known."""


def test_the_identity_is_the_given_name_or_a_fingerprint() -> None:
    assert found(Drawn()).training == IndexedData(ROWS, "")
    assert not found(Drawn()).training.is_checked
    assert found(DrawnAtOnce()).training == IndexedData(ROWS, "5c4f2a")
    assert found(DrawnAtOnce(), name="images 3").training == IndexedData(ROWS, "images 3")
    assert found(list(range(7)), validation=Drawn(5)).validation == IndexedData(5, "")


def test_the_digest_depends_on_the_length_and_the_name() -> None:
    data = [IndexedData(7, ""), IndexedData(8, ""), IndexedData(7, "a"), IndexedData(7, "b")]
    assert len({each.digest for each in data}) == 4
    assert recorded_data(ScriptData(data[2]).as_record()) == data[2]


def test_a_fingerprint_of_hugging_face_is_the_same_in_every_process() -> None:
    datasets = pytest.importorskip("datasets")
    one, other = (datasets.Dataset.from_dict({"x": [1, 2, 3]}) for _ in range(2))
    assert found(one) == found(other)
    assert found(one).training.is_checked
    assert reads_several(one)
    with pytest.raises(UsageError, match="got an IterableDataset"):
        found(one.to_iterable_dataset())
    with pytest.raises(UsageError, match="got a mapping with the keys 'train'; pass one of its datasets"):
        found(datasets.DatasetDict({"train": one}))


@pytest.mark.parametrize("dataset", [Endless(), Foreign(), iter([1])])
def test_an_iterable_dataset_is_refused_with_the_two_ways_out(dataset: object) -> None:
    with pytest.raises(UsageError) as caught:
        found(dataset)
    sentence = str(caught.value)
    assert sentence.startswith("run.dataset() got an IterableDataset, whose samples have no index")
    assert "`undula data convert` and set data.train" in sentence
    assert sentence.endswith("or pass a view of them with __len__ and __getitem__")


@pytest.mark.parametrize(
    ("dataset", "arguments", "sentence"),
    [
        (DataLoader(Drawn()), {}, "got a DataLoader, whose sampler or batch sampler would decide the order"),
        ({"train": Drawn()}, {}, "got a mapping with the keys 'train'; pass one of its datasets"),
        (WithoutLength(), {}, "got an object of type WithoutLength, whose samples have no index"),
        (Drawn(), {"validation": Endless()}, "got an IterableDataset"),
        (Drawn(), {"num_workers": -1}, "got num_workers=-1; set it to 0 or more"),
        (Drawn(), {"name": ""}, 'got name=""; give a name that changes when the content does'),
        (
            Drawn(),
            {"loader_arguments": {"batch_sampler": None}},
            "does not take batch_sampler=; the plan decides the order",
        ),
        (
            Drawn(),
            {"loader_arguments": {"sampler": None}},
            "does not take sampler=; the plan decides the order; to weight samples",
        ),
        (Drawn(), {"loader_arguments": {"works": 1}}, "does not take works=; remove it"),
    ],
)
def test_what_a_run_cannot_use_is_refused_in_one_sentence(
    dataset: object, arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        found(dataset, **arguments)
    assert str(caught.value).startswith(f"run.dataset() {sentence}")


def test_the_refused_arguments_are_those_of_a_data_loader() -> None:
    assert REPLACEMENTS.keys() <= DataLoader.__init__.__annotations__.keys() | set(vars(DataLoader(Drawn())))


def test_a_shuffle_of_row_groups_is_refused() -> None:
    with pytest.raises(SpecError, match=r"plan\.shuffle=row_groups needs row groups"):
        IndexedData(7, "").check_plan(PlanSpec(shuffle="row_groups"))
    IndexedData(7, "").check_plan(PlanSpec(shuffle="none"))


def test_a_subset_reads_several_samples_only_if_its_dataset_does() -> None:
    assert not reads_several(Subset(Subset(Drawn(), [1, 2]), [1]))
    assert reads_several(Subset(DrawnAtOnce(), [1, 2]))
    assert not reads_several(TensorDataset())
