"""How torch.distributed.checkpoint reads and writes a checkpoint's files: safetensors for tensors, JSON for the rest.

torch's own storage pickles its metadata; this one stores nothing that loading would run.
"""

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from undula.state.commit import COMMIT, Commit, commit_json
from undula.state.values import dtype_named
from undula.storage import Store


class SafetensorsWriter(StorageWriter):
    """Writes a rank's share of the tensors as one safetensors file; the coordinator's `commit.json` comes last."""

    def __init__(
        self,
        store: Store,
        folder: str,
        header: dict[str, Any],
        before_commit: Callable[[], None],
        after_commit: Callable[[], None],
    ):
        self._store = store
        self._folder = folder
        self._header = header
        self._before_commit = before_commit
        self._after_commit = after_commit

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        name = f"rank-{plan.storage_data:05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        places = []
        for item in plan.items:
            assert item.tensor_data is not None, "values that are no tensors go to commit.json"
            offsets = list(item.tensor_data.chunk.offsets)
            key = f"{item.index.fqn}@{','.join(map(str, offsets))}" if any(offsets) else item.index.fqn
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensor = _as_stored(tensor.detach().cpu()).contiguous()
            # safetensors refuses tensors that share memory, as tied weights do.
            is_shared = any(
                tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in tensors.values()
            )
            tensors[key] = tensor.clone() if is_shared else tensor
            places.append((item, {"offsets": offsets, "sizes": list(item.tensor_data.chunk.sizes), "key": key}))
        results = []
        if tensors:
            data = safetensors.torch.save(tensors)
            self._store.write(f"{self._folder}/{name}", data)
            file = {"file": name, "bytes": len(data), "sha256": sha256(data).hexdigest()}
            results = [WriteResult(item.index, len(data) // len(places), {**place, **file}) for item, place in places]
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, Any] = {}
        files = {}
        for result in (result for of_rank in results for result in of_rank):
            saved = metadata.state_dict_metadata[result.index.fqn]
            assert isinstance(saved, TensorStorageMetadata)
            place = result.storage_data
            entry = tensors.setdefault(
                result.index.fqn,
                {"dtype": str(saved.properties.dtype).removeprefix("torch."), "shape": list(saved.size), "chunks": []},
            )
            entry["chunks"].append({key: place[key] for key in ("offsets", "sizes", "file", "key")})
            files[place["file"]] = {"bytes": place["bytes"], "sha256": place["sha256"]}
        self._before_commit()
        self._store.write(f"{self._folder}/{COMMIT}", commit_json({**self._header, "tensors": tensors, "files": files}))
        self._after_commit()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class SafetensorsReader(StorageReader):
    """Reads what `SafetensorsWriter` wrote, at any world size."""

    def __init__(self, store: Store, commit: Commit):
        self._store = store
        self._commit = commit

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        places = {}
        for name, saved in self._commit.tensors.items():
            chunks = []
            for chunk in saved["chunks"]:
                offsets = torch.Size(chunk["offsets"])
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk["sizes"])))
                places[MetadataIndex(name, offsets)] = (chunk["file"], chunk["key"])
            properties = TensorProperties(dtype=dtype_named(saved["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(saved["shape"]), chunks)
        return Metadata(tensors, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        files: dict[str, dict[str, Tensor]] = {}
        for item in plan.items:
            file, key = self._places[item.storage_index]
            if file not in files:
                files[file] = safetensors.torch.load(self._store.read(f"{self._commit.folder}/{file}"))
            source = _from_stored(files[file][key], dtype_named(self._commit.tensors[item.storage_index.fqn]["dtype"]))
            for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dimension, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _as_stored(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones: safetensors does not have all complex types."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _from_stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor
