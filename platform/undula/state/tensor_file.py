"""Files in the format of safetensors: their content as buffers, and the reading of single tensors from a store."""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from undula.storage import Store
from undula.storage.retries import named_errors

READ_BYTES = 32 * 2**20
"""Number of bytes that are read at once."""
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""Name of each dtype in the header of a safetensors file."""
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


class TensorFile:
    """Safetensors file in a store, from which tensors are read one by one, so that no more than one of them is in memory.

    Args:
        store: Store that has the file.
        name: Name of the file.

    Raises:
        StorageError: The file cannot be read.
        ValueError: It is not a safetensors file.
    """

    def __init__(self, store: Store, name: str):
        self._url = f"{store.url}/{name}"
        self._file = store.open(name)
        with named_errors("read", self._url):
            self._end = self._file.size()
            header_bytes = int.from_bytes(self._file.read(8), "little")
            self._begin = 8 + header_bytes
            if self._begin > self._end:
                raise ValueError("it is not a safetensors file")
            self._header: dict[str, Any] = json.loads(self._file.read(header_bytes))

    def position(self, key: str) -> int:
        """Return the position of a tensor's first byte. Reads in the order of positions need the fewest requests to S3.

        Raises:
            KeyError: The file has no such tensor.
        """
        begin, _ = self._header[key]["data_offsets"]
        return self._begin + int(begin)

    def read(self, key: str) -> Tensor:
        """Read a tensor into host memory.

        Raises:
            KeyError: The file has no such tensor.
            ValueError: Its entry in the header does not fit the file.
        """
        entry = self._header[key]
        begin, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        if not 0 <= begin <= end <= self._end - self._begin or end - begin != prod(entry["shape"]) * dtype.itemsize:
            raise ValueError(f"the place of {key!r} does not fit the file")
        tensor = torch.empty(entry["shape"], dtype=dtype, device="cpu")
        view = tensor.reshape(-1).view(torch.uint8).numpy().data
        with named_errors("read", self._url):
            self._file.seek(self._begin + begin)
            for start in range(0, len(view), READ_BYTES):
                part = view[start : start + READ_BYTES]
                if self._file.readinto(part) != len(part):
                    raise ValueError(f"the file ends within {key!r}")
        return tensor


def file_buffers(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[bytes | memoryview]:
    """Return the content of a safetensors file: its header, and a view of each tensor. No tensor is copied.

    Args:
        tensors: Contiguous tensors in host memory, by name.
        metadata: Texts that the header also holds, by name; None for none.
    """
    # The largest elements come first, so that the bytes of each tensor are aligned.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in ordered:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    views = [tensors[name].reshape(-1).view(torch.uint8).numpy().data for name in ordered]
    return [len(text).to_bytes(8, "little"), text, *views]
