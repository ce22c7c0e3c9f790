"""Tests of the files of a checkpoint: they are safetensors files, and writing one copies no tensor."""

from hashlib import sha256
from pathlib import Path

import pytest
import safetensors.torch
import torch

from undula.state.checkpoint_files import write_share
from undula.state.extents import Extent
from undula.state.pieces import Holding, rank_state
from undula.state.tensor_file import SAFETENSORS_DTYPES, file_buffers
from undula.storage import Store


def example(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(64, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES, ids=str)
def test_safetensors_loads_what_is_written(dtype: torch.dtype) -> None:
    source = torch.zeros(6, dtype=torch.bool) if dtype == torch.bool else example(dtype)
    tensors = {
        "matrix": source[:6].view(2, 3),
        "a scalar": source[1].reshape(()),
        "nothing": source[:0].view(0, 4),
        'a name with \u00e9 and "': source[:3],
    }
    loaded = safetensors.torch.load(b"".join(file_buffers(tensors)))
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_tensors_of_several_dtypes_are_aligned() -> None:
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(3, dtype=torch.float64), "c": torch.ones(5)}
    loaded = safetensors.torch.load(b"".join(file_buffers(tensors)))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_written_share_copies_no_tensor_and_has_its_checksum(tmp_path: Path) -> None:
    tensor = torch.arange(12.0)
    (_, _, view) = file_buffers({"w": tensor})
    tensor[0] = 7.0
    assert view[:4] == tensor[:1].numpy().tobytes()
    store = Store(str(tmp_path))
    state = rank_state({"w": tensor, "z": torch.ones(2, dtype=torch.complex64)})
    boxes = {name: piece.box for name, piece in state.pieces.items()}
    extent, _ = Extent.of(Holding(state.expected, boxes))
    written = write_share(store, "folder", 3, {name: piece.tensor for name, piece in state.pieces.items()}, extent)
    assert written is not None
    assert written.extent == extent
    data = store.read(f"folder/{written.name}")
    assert (written.bytes, written.sha256) == (len(data), sha256(data).hexdigest())
