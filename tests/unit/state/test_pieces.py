"""Tests of pieces of state."""

import pytest
import torch
from torch import Tensor

from undula.errors import UsageError
from undula.state import pieces
from undula.state.pieces import Rows, copy_in_parts, rank_state


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (torch.arange(40.0).reshape(10, 4), 5),
        (torch.arange(40.0).reshape(4, 10).t(), 5),
        (torch.arange(24.0).reshape(2, 12), 2),
        (torch.tensor(3.0), 1),
        (torch.empty(0, 4), 1),
    ],
)
def test_a_large_tensor_is_copied_in_parts(source: Tensor, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PART_BYTES", 32)
    target, copied = torch.empty_like(source), []
    copy_in_parts(source, target, lambda: copied.append(None))
    assert torch.equal(target, source)
    assert target.stride() == source.stride()
    assert len(copied) == parts


def test_rows_are_tensors_of_some_virtual_workers_alone() -> None:
    state = rank_state({"rows": Rows({1: torch.ones(2), 3: torch.zeros(2)}, 4), "w": torch.ones(1)})
    assert [*state.own.pieces] == ["rows.1", "rows.3"]
    assert {*state.expected} == {*(f"rows.{number}" for number in range(4)), "w"}
    assert not state.is_whole
    assert rank_state({"rows": Rows({0: torch.ones(2)}, 1)}).is_whole


@pytest.mark.parametrize(
    "of", [{}, {4: torch.ones(1)}, {0: torch.ones(1), 1: torch.ones(2)}, {0: torch.ones(1), 1: torch.ones(1).double()}]
)
def test_wrong_rows_are_refused(of: dict[int, Tensor]) -> None:
    with pytest.raises(UsageError, match=r"of 4 were given; give one tensor for each virtual worker of this rank"):
        Rows(of, 4)


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"two tensors of the name 'rows\.0'"):
        rank_state({"rows": Rows({1: torch.ones(2)}, 4), "rows.0": torch.ones(2)})
