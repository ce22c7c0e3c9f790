"""Tests of the digest of a state."""

import pytest
import torch

from undula.state.pieces import piece_of
from undula.train.saver import additive_digest


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.complex128, torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.bool]
)
def test_a_digest_reads_a_state_without_changing_it(dtype: torch.dtype) -> None:
    state = torch.arange(6).to(dtype).view(2, 3)
    before = state.clone()
    digests = {additive_digest({"w": piece_of(state)}) for _ in range(2)}
    assert len(digests) == 1
    assert torch.equal(state, before)
