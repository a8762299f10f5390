"""The weights of the last push, kept for an engine that restarts while the trainer goes on.

They are files in the run directory, one per bucket, on the host of the trainer's first rank: a copy
of the policy in the engines' dtype on its disk, written at each push, that takes no memory.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import load_file

from onpolicy.errors import WeightSyncError
from onpolicy.weights.digest import WeightBucket, write_weights
from onpolicy.weights.transports.disk import PREFIX, unwritable


class KeptWeights:
    """At most one version of the weights on disk.

    A later run removes the files of a killed run, as it does for its pushes.
    """

    def __init__(self, directory: Path):
        self._parent = directory.absolute()
        self._directory: Path | None = None
        self.version: int | None = None

    def keep(self, buckets: Iterable[WeightBucket], version: int) -> Iterator[WeightBucket]:
        """Yield the buckets, each after it is written; they replace the kept version at the end.

        Raise WeightSyncError if they cannot be written.
        """
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
        """Yield the kept buckets on a device.

        Raise WeightSyncError if the kept version is another one.
        """
        if self._directory is None or version != self.version:
            raise WeightSyncError(
                f"version={version}: the weights that are kept for engines that are started again are "
                f"of version {self.version}. No checkpoint is lost: resume with --load."
            )
        for file in sorted(self._directory.glob("*.safetensors")):
            yield list(load_file(file, device=device).items())
