"""Sums over bits of tensors of any layout."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from undula.recovery import fingerprint
from undula.recovery.fingerprint import Watched, differ

MAKES: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: torch.arange(6.0).view(2, 3),
    "a column": lambda: torch.arange(12.0).view(6, 2)[:, 0],
    "every second": lambda: torch.arange(10.0)[::2],
    "a real part": lambda: torch.polar(torch.ones(4), torch.arange(4.0)).real,
    "a conjugate": lambda: torch.polar(torch.ones(4), torch.arange(4.0)).conj(),
    "a negative": lambda: torch.polar(torch.ones(4), torch.arange(4.0)).conj().imag,
    "halves from an odd place": lambda: torch.arange(5.0).half()[1:],
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed rows": lambda: torch.eye(3).to_sparse_csr(),
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_change_is_seen_in_a_tensor_of_any_layout(name: str) -> None:
    tensor = MAKES[name]()
    watched = Watched(lambda: [tensor])
    before = watched.take()
    assert not differ(before, watched.take())
    (tensor.values() if name == "compressed rows" else tensor).mul_(2)
    assert differ(before, watched.take())


def test_copies_are_small_and_change_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.rand(shape) for shape in ((70_000,), (3,), (5, 200), (40_000,))]
    watched = Watched(lambda: tensors)
    alone = [watched._sums(tensor.view(-1).view(torch.uint8)) for tensor in tensors]
    monkeypatch.setattr(fingerprint, "COPIED_ROWS", 1)
    assert [watched._sums(tensor.view(-1).view(torch.uint8)) for tensor in tensors] == alone
    flat = tensors[0].view(torch.uint8)
    words = flat.view(torch.int64)
    factors = watched._factors[flat.device]
    assert fingerprint._sum(words, factors, shift=32) == fingerprint._sum(words >> 32, factors)
