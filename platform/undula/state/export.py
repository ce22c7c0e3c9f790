"""Export of a run's weights as Hugging Face stores a model: safetensors files, and an index if there are several."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from undula.errors import CheckpointError, SpecError
from undula.state.checkpoint_files import read_pieces, table_of
from undula.state.commit import Commit
from undula.state.model_state import MODEL, is_extra
from undula.state.pieces import Table, TensorSpec, dtype_named, empty_tensor, piece_of
from undula.state.tensor_file import file_buffers
from undula.state.weights import Which, chosen_checkpoint
from undula.storage import Store

FILE_BYTES = 5 * 10**9
"""Maximum number of bytes of the tensors in a file, as in Hugging Face's libraries. Only a single larger tensor exceeds it."""
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Exported:
    """Weights that were exported."""

    step: int
    """Number of steps after which the run had these weights."""
    files: tuple[str, ...]
    """Names of the safetensors files."""
    tensors: int
    """Number of tensors."""
    bytes: int
    """Size of the tensors in bytes."""
    left_out: tuple[str, ...]
    """Names of modules' extra state, which is not weights and which Hugging Face's format cannot hold."""


def export_weights(store: Store, out: Store, which: Which = "last", file_bytes: int = FILE_BYTES) -> Exported:
    """Write the weights of a run into a folder. The process needs memory for one file of them.

    Args:
        store: Run directory.
        out: Folder for the files.
        which: Checkpoint: the newest one or a number of steps.
        file_bytes: Maximum number of bytes of the tensors in a file.

    Raises:
        SpecError: The folder has exported weights already.
        CheckpointError: There is no such checkpoint, it is damaged, or it has a tensor of a dtype that the format does not have.
    """
    if present := sorted(name for name in out.names("") if name.startswith("model") and ".safetensors" in name):
        raise SpecError(f"{out.url} has {present[0]!r} already; name another folder with --out, or delete it there")
    commit = chosen_checkpoint(store, which)
    table = {name: spec for name, spec in table_of(commit).items() if name.startswith(MODEL) and not is_extra(name)}
    for name, spec in table.items():
        if dtype_named(spec.dtype).is_complex:
            raise CheckpointError(
                f"{name.removeprefix(MODEL)!r} is complex, which Hugging Face's format cannot hold; use undula.load_weights"
            )
    stored = {name: commit.tensors[name]["key"] for name in table}
    tied = {name: first for name, first in stored.items() if first != name and first in table}
    table = {name: spec for name, spec in table.items() if name not in tied}
    parts = list(_parts(table, file_bytes))
    names = [ONE_FILE]
    if len(parts) > 1:
        names = [f"model-{place:05d}-of-{len(parts):05d}.safetensors" for place in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        _write(store, commit, out, name, part, tied)
    total = sum(map(_bytes_of, table.values()))
    if len(parts) > 1:
        places = {key.removeprefix(MODEL): name for name, part in zip(names, parts, strict=True) for key in part}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        out.write(INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
    extra = {
        name.removeprefix(MODEL)
        for name in (*commit.tensors, *commit.values)
        if name.startswith(MODEL) and name not in {*table, *tied}
    }
    return Exported(commit.step, tuple(names), len(table), total, tuple(sorted(extra)))


def _parts(table: Table, file_bytes: int) -> Iterable[dict[str, TensorSpec]]:
    """Divide tensors into files of at most `file_bytes`, in their order in the model."""
    part: dict[str, TensorSpec] = {}
    size = 0
    for name, spec in table.items():
        if part and size + _bytes_of(spec) > file_bytes:
            yield part
            part, size = {}, 0
        part[name] = spec
        size += _bytes_of(spec)
    yield part


def _write(
    store: Store, commit: Commit, out: Store, name: str, part: Mapping[str, TensorSpec], tied: Mapping[str, str]
) -> None:
    """Write one file of the export. Its tensors are freed before the next file is read."""
    # A saved tensor may have other strides, such as those of channels_last, and the file has none.
    tensors = {key: empty_tensor(TensorSpec(spec.dtype, spec.shape)) for key, spec in part.items()}
    read_pieces(store, commit, {key: piece_of(tensor) for key, tensor in tensors.items()})
    # transformers refuses a file that does not say that its tensors are PyTorch's.
    metadata = {"format": "pt", "undula_step": str(commit.step)}
    # As safetensors.torch.save_model does, whose load_model refuses files that have tied weights twice.
    metadata |= {name.removeprefix(MODEL): first.removeprefix(MODEL) for name, first in tied.items() if first in part}
    out.write_buffers(
        name, file_buffers({key.removeprefix(MODEL): tensor for key, tensor in tensors.items()}, metadata)
    )


def _bytes_of(spec: TensorSpec) -> int:
    return prod(spec.shape) * dtype_named(spec.dtype).itemsize
