"""Tests that tensors are found and replaced in batches of any nesting."""

from collections import UserDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, tensor
from torch.nn.utils.rnn import pack_sequence

from undula.data.nested import moved, tensors_of, with_tensors


class Pair(NamedTuple):
    left: Tensor
    right: Any


class Encoding(UserDict[str, Any]):
    """Mapping that knows more than its values, as what a tokenizer returns."""

    def __init__(self, values: dict[str, Any], language: str = ""):
        super().__init__(values)
        self.language = language


def test_tensors_are_replaced_in_any_nesting() -> None:
    batch = {"a": [tensor(1), "text"], "b": (tensor(2), Pair(tensor(3), {"c": tensor(4)})), "d": 5}
    made = with_tensors(batch, lambda each: each * 10)
    assert made == {"a": [tensor(10), "text"], "b": (tensor(20), Pair(tensor(30), {"c": tensor(40)})), "d": 5}
    assert isinstance(made["b"][1], Pair)
    assert [int(each) for each in tensors_of(batch)] == [1, 2, 3, 4]
    assert with_tensors(tensor(1), lambda each: each + 1) == tensor(2)


def test_mappings_keep_their_types_and_the_batch_is_not_changed() -> None:
    batch = Encoding({"a": tensor(1)}, "en")
    made = with_tensors(batch, lambda each: each * 10)
    assert (type(made), made.language, made["a"], batch["a"]) == (Encoding, "en", tensor(10), tensor(1))
    assert with_tensors(MappingProxyType({"a": tensor(1)}), lambda each: each * 10) == {"a": tensor(10)}


class Rows(list[Any]):
    """List of a library's own type."""


@dataclass(frozen=True)
class Sample:
    image: Tensor
    boxes: list[Tensor]
    name: str


def test_dataclasses_and_subclasses_of_list_keep_their_types() -> None:
    batch = Rows([Sample(tensor(1), [tensor(2)], "a"), tensor(3)])
    made = with_tensors(batch, lambda part: part * 10)
    assert type(made) is Rows
    assert made == [Sample(tensor(10), [tensor(20)], "a"), tensor(30)]
    assert batch[0].image == 1
    assert [int(part) for part in tensors_of(batch)] == [1, 2, 3]


class Graphs:
    """Batch that moves itself, as those of libraries for graphs."""

    def __init__(self, nodes: Tensor):
        self.nodes = nodes

    def to(self, device: torch.device) -> "Graphs":
        return Graphs(self.nodes.to(device))


def test_objects_with_a_method_for_it_move_themselves() -> None:
    packed, graphs = pack_sequence([torch.ones(2)]), Graphs(torch.ones(2))
    assert with_tensors([packed], lambda part: part * 10)[0] is packed
    assert list(tensors_of([packed, graphs])) == []
    batch = moved({"packed": packed, "graphs": [graphs], "x": tensor(1), "kind": Graphs}, torch.device("meta"))
    assert {batch["packed"].data.device.type, batch["graphs"][0].nodes.device.type, batch["x"].device.type} == {"meta"}
    assert batch["kind"] is Graphs
