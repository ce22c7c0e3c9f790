"""Tests of pieces of state."""

import pytest
import torch
from torch import Tensor

from undula.state import pieces
from undula.state.pieces import copy_in_parts


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
