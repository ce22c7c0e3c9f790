"""Tests that tensors are found and replaced in batches of any nesting."""

from collections import UserDict
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, tensor
from torch.nn.utils.rnn import pack_sequence

from undula.data.nested import tensors_of, with_tensors


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


def test_objects_that_move_themselves_are_left_to_the_script() -> None:
    packed = pack_sequence([torch.ones(2)])
    assert with_tensors([packed], lambda each: each * 10)[0] is packed
    assert list(tensors_of([packed])) == []
