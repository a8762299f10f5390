"""Weights in safetensors files: a transport, and the last push kept for an engine that restarts.

The transport is for engines that only share a file system with the trainer. The kept weights are
files in the run directory, one per bucket, on the host of the trainer's first rank: a copy of the
policy in the engines' dtype on its disk, written at each push, that takes no memory.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from safetensors.torch import load_file

from onpolicy.errors import WeightSyncError
from onpolicy.weights.digest import WeightBucket, write_weights
from onpolicy.weights.push import Engine, Transport, on_all, size_of

PREFIX = ".weights_"
"""Prefix of the directories with weights; a later run may remove them."""


class DiskTransport(Transport):
    """SGLang's update_weights_from_disk: one file per bucket, removed after the push. The files are
    in a new directory under `directory`, so that no other files are touched."""

    in_session = False
    one_copy = True

    def is_near(self, engine: Engine) -> bool:
        return False  # all ranks share the file system, so rank 0 writes

    def __init__(self, directory: Path):
        self._parent = directory.absolute()
        self._directory: Path | None = None
        self._count = self._num_bytes = 0

    def open(self, engines: Sequence[Engine]) -> None:
        self._directory = self._parent / f"{PREFIX}{uuid.uuid4().hex}"
        self._count = self._num_bytes = 0
        try:
            self._directory.mkdir(parents=True)
        except OSError as error:
            raise unwritable(self._directory, error) from error

    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: int) -> None:
        assert self._directory is not None
        file = self._directory / f"model-{self._count:05d}.safetensors"
        self._count += 1
        self._num_bytes += size_of(bucket)
        try:
            write_weights(bucket, file)
        except OSError as error:
            raise unwritable(file, error) from error

    def close(self, engines: Sequence[Engine], version: int) -> None:
        body = {
            "model_path": str(self._directory),
            "weight_version": str(version),
            "flush_cache": False,
        }
        path, num_bytes = "/update_weights_from_disk", self._num_bytes
        on_all(engines, lambda engine: engine.post(path, body, num_bytes))
        self.abandon()

    def abandon(self) -> None:
        """Remove the files of this push."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def unwritable(path: Path, error: OSError) -> WeightSyncError:
    """Return the error for weights that cannot be written."""
    return WeightSyncError(
        f"{path}: cannot be written ({error.strerror or error}). No checkpoint is lost: free some space "
        "under --run-dir, or choose another --weight-sync, and resume with --load."
    )


def remove_leftovers(directory: Path) -> None:
    """Remove the files of killed pushes; this run alone pushes from there now."""
    for leftover in directory.glob(PREFIX + "[0-9a-f]" * 32):
        shutil.rmtree(leftover, ignore_errors=True)


class KeptWeights:
    """At most one version of the weights on disk. A later run removes the files of a killed run, as
    it does for its pushes."""

    def __init__(self, directory: Path):
        self._parent = directory.absolute()
        self._directory: Path | None = None
        self.version: int | None = None

    def keep(self, buckets: Iterable[WeightBucket], version: int) -> Iterator[WeightBucket]:
        """Yield the buckets, each after it is written; they replace the kept version at the end.
        Raise WeightSyncError if they cannot be written."""
        directory = self._parent / f"{PREFIX}{uuid.uuid4().hex}"
        try:
            directory.mkdir(parents=True)
            for number, bucket in enumerate(buckets):
                write_weights(bucket, directory / f"model-{number:05d}.safetensors")
                yield bucket
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, OSError):
                raise unwritable(directory, error) from error
            raise
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory, self.version = directory, version

    def buckets(self, version: int, device: str) -> Iterator[WeightBucket]:
        """Yield the kept buckets on a device. Raise WeightSyncError if the kept version is another
        one."""
        if self._directory is None or version != self.version:
            raise WeightSyncError(
                f"version={version}: the weights that are kept for engines that are started again are "
                f"of version {self.version}. No checkpoint is lost: resume with --load."
            )
        for file in sorted(self._directory.glob("*.safetensors")):
            yield list(load_file(file, device=device).items())
