"""Checkpoints that run code when they are loaded without care: what they run makes a directory."""

import os
import pickle

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex


class Code:
    """Unpickling it makes `trace`."""

    def __init__(self, trace):
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def in_the_index(sharded, trace):
    """The index itself is the code."""
    (sharded / ".metadata").write_bytes(pickle.dumps(Code(trace)))


def beside_the_index(sharded, trace):
    """A whole and honest index, with code in a field that nothing reads."""
    metadata = FileSystemReader(sharded).read_metadata()
    metadata.planner_data = Code(trace)
    (sharded / ".metadata").write_bytes(pickle.dumps(metadata))


def behind_the_index(sharded, trace):
    """The index says that its first tensor is bytes in another file, which are the code.

    With the tensor's size on the entry, which Megatron asks for.
    """
    code = pickle.dumps(Code(trace))
    (sharded / "__9_9.distcp").write_bytes(code)
    metadata = FileSystemReader(sharded).read_metadata()
    name = next(iter(metadata.state_dict_metadata))
    entry = BytesStorageMetadata()
    entry.size = metadata.state_dict_metadata[name].size
    metadata.state_dict_metadata[name] = entry
    for place in [place for place in metadata.storage_data if place.fqn == name]:
        del metadata.storage_data[place]
    info = _StorageInfo(relative_path="__9_9.distcp", offset=0, length=len(code))
    metadata.storage_data[MetadataIndex(name)] = info
    (sharded / ".metadata").write_bytes(pickle.dumps(metadata))


def in_the_common_state(sharded, trace):
    """Megatron's file of what is no tensor is the code."""
    (sharded / "common.pt").write_bytes(pickle.dumps(Code(trace)))


ATTACKS = {
    in_the_index: r"its index names (posix|os)\.mkdir, which is no part of an index",
    beside_the_index: r"its index names (posix|os)\.mkdir, which is no part of an index",
    behind_the_index: r"its index says that \S+ is no tensor but BytesStorageMetadata",
}


def tell_of_another_file(sharded, path):
    """The index says that everything is in `path`."""
    metadata = FileSystemReader(sharded).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = path
    (sharded / ".metadata").write_bytes(pickle.dumps(metadata))
