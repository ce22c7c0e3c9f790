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


def _flip_signs(tensor: Tensor) -> None:
    """Change the highest bits of two words in one column."""
    per_word = 8 // tensor.itemsize
    tensor[per_word - 1 :: per_word * fingerprint.COLUMNS][:2].neg_()


def _swap_rows(tensor: Tensor) -> None:
    rows = tensor[:40_000].view(100, 400)
    rows[3], rows[7] = rows[7].clone(), rows[3].clone()


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "the first": lambda tensor: tensor[0].add_(1),
    "the last": lambda tensor: tensor[-1].add_(1),
    "nearly all signs": lambda tensor: tensor[:-8].neg_(),
    "two signs": _flip_signs,
    "two rows": _swap_rows,
    "one bit": lambda tensor: tensor[30_001:30_002].view(torch.uint8)[0].bitwise_xor_(1),
}


@pytest.mark.parametrize("size", [50_000, 50_001, 24 * fingerprint.COLUMNS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_cpu", [True, False], ids=["as on a CPU", "as on other devices"])
def test_changes_of_many_elements_are_seen_in_each_chunk(
    on_cpu: bool, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "CACHED_ROWS", 2)
    if not on_cpu:
        monkeypatch.setattr(fingerprint, "_is_array", lambda tensor: False)
    tensor = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    watched = Watched(lambda: [tensor])
    for name, change in CHANGES.items():
        before = watched.take()
        assert not differ(before, watched.take())
        change(tensor)
        assert differ(before, watched.take()), name


def test_small_tensors_are_seen_beside_others() -> None:
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in range(1, 20)]
    watched = Watched(lambda: tensors)
    for tensor in tensors:
        for place in range(len(tensor)):
            before = watched.take()
            tensor[place] += 1
            assert differ(before, watched.take())
