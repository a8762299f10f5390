"""Reads torch DCP's checkpoints without running what somebody may have hidden in them.

DCP pickles its index, and unpickles whatever the index calls bytes (`DefaultLoadPlanner.load_bytes`
in torch/distributed/checkpoint/default_planner.py). So the index may name nothing but records of
its own, and those nothing but tensors, which torch reads without unpickling, in files beside it.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from onpolicy.errors import CheckpointError


class IndexReader(dcp.FileSystemReader):
    """DCP's reader for an index that nobody vouches for."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises CheckpointError for an index that holds more than an index does."""
        metadata = _unpickle((Path(self.path) / ".metadata").read_bytes())
        _require_tensors_in_files_beside_it(metadata)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    _ALLOWED: ClassVar = {
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
            "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.distributed.checkpoint.planner": {
            "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
        },
        "torch.serialization": {"_get_layout"},
        "torch": {"Size", "float32", "bfloat16", "uint8"},
        "pathlib": {"PosixPath", "PurePosixPath"},
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if name in self._ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f"its index names {module}.{name}, which is no part of an index")


def _unpickle(data: bytes) -> Metadata:
    try:
        metadata = _IndexUnpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # an unpickler meets bytes that are no pickle with any of them
        raise CheckpointError(f"its index cannot be read: {error!r}") from error
    if type(metadata) is not Metadata:
        raise CheckpointError(f"its index is a {type(metadata).__name__}")
    return metadata


def _require_tensors_in_files_beside_it(metadata: Metadata) -> None:
    for name, entry in _items(metadata.state_dict_metadata):
        if type(entry) is not TensorStorageMetadata:
            raise CheckpointError(
                f"its index says that {name} is no tensor but {type(entry).__name__}, which would be "
                "unpickled"
            )
    for place, info in _items(metadata.storage_data):
        if type(info) is not _StorageInfo or info.transform_descriptors:
            raise CheckpointError(f"its index says that {place} is stored in an unknown way")
        if not _is_plain_name(info.relative_path):
            raise CheckpointError(
                f"its index says that {place} is in {info.relative_path!r}, which is no file beside it"
            )


def _items(entries: Any) -> Any:
    if type(entries) is not dict:
        raise CheckpointError("its index has no entries")
    return entries.items()


def _is_plain_name(path: Any) -> bool:
    return type(path) is str and path not in ("", ".", "..") and Path(path).name == path
