"""Safetensors files: for engines that share no more than a file system with the trainer."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from onpolicy.errors import WeightSyncError
from onpolicy.weight_sync.base import Engine, Transport, on_all, size_of
from onpolicy.weights import WeightBucket


class DiskTransport(Transport):
    """SGLang's update_weights_from_disk: one file per bucket, removed after the push."""

    in_session = False

    def __init__(self, directory: Path):
        self.directory = directory.absolute()
        self._count = self._num_bytes = 0

    def open(self, engines: Sequence[Engine]) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self._count = self._num_bytes = 0

    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: str) -> None:
        file = self.directory / f"model-{self._count:05d}.safetensors"
        self._count += 1
        self._num_bytes += size_of(bucket)
        try:
            save_file({name: tensor.contiguous().cpu() for name, tensor in bucket}, file)
        except OSError as error:
            raise WeightSyncError(f"{file}: cannot be written ({error.strerror}).") from error

    def close(self, engines: Sequence[Engine], version: str) -> None:
        body = {"model_path": str(self.directory), "weight_version": version, "flush_cache": False}
        path, num_bytes = "/update_weights_from_disk", self._num_bytes
        on_all(engines, lambda engine: engine.post(path, body, num_bytes))
        shutil.rmtree(self.directory)
