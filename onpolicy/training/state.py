"""A training engine's part of a checkpoint: its tensors, sharded, and a few numbers.

Reading runs no code that a checkpoint may contain. DCP pickles its index, and unpickles entries of
bytes (`DefaultLoadPlanner.load_bytes` in torch/distributed/checkpoint/default_planner.py). The index
may therefore name only DCP's own records, and these only tensors, which torch reads without unpickling,
in files beside it.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.optim import Optimizer

from onpolicy.errors import CheckpointError
from onpolicy.training import distributed

_SHARDED = "sharded"
_NUMBERS = "numbers.json"


def save_state(directory: Path, numbers: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Write tensors by `write`, and `numbers`, which must be JSON-compatible, into a directory;
    collective.

    Raises CheckpointError if the tensors cannot be written.
    """
    try:
        write(directory / _SHARDED)
    except CheckpointException as error:  # a BaseException
        raise CheckpointError(_reason(error)) from error
    if distributed.rank() == 0:
        (directory / _NUMBERS).write_text(json.dumps(numbers))


def load_state(directory: Path, read: Callable[[Path], None]) -> dict[str, Any]:
    """Read tensors by `read` from the directory that `save_state` wrote; collective.

    Returns the numbers. Raises CheckpointError for a damaged checkpoint or one of another model.
    """
    sharded = directory / _SHARDED
    try:
        IndexReader(sharded).read_metadata()  # fails early, since DCP's own errors are very long
        numbers = _numbers(json.loads((directory / _NUMBERS).read_text()))
        read(sharded)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError,
            CheckpointException) as error:  # fmt: skip
        raise CheckpointError(
            f"--load: {directory} is damaged or does not fit this model ({_reason(error)}). Give the "
            "--hf-checkpoint that it was made from, or remove it to resume from an earlier one."
        ) from error
    return numbers


def _numbers(read: Any) -> dict[str, Any]:
    """Return what was read if it is an object of objects. Raises ValueError otherwise."""
    if not isinstance(read, dict) or not all(isinstance(each, dict) for each in read.values()):
        raise ValueError(f"{_NUMBERS}: must be an object of objects")
    return read


def create_missing_moments(optimizer: Optimizer) -> None:
    """Create AdamW's state as its first step would, so that there is state to save or to load into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _reason(error: BaseException) -> str:
    """Return the first rank's error message, without DCP's collected tracebacks."""
    failures = getattr(error, "failures", None)
    return str(next(iter(failures.values()))[0] if failures else error)


class IndexReader(dcp.FileSystemReader):
    """DCP's reader, for an untrusted index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index. Raises CheckpointError for an index that names anything but DCP's records and
        tensors."""
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
    except Exception as error:  # bytes that are no pickle raise any of many errors
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
