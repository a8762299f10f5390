"""Weights on the GPUs of the same host, whose engines open the trainer's own memory (CUDA IPC).

Nothing is copied to the host, and nothing at all for an engine on the GPU that holds the bucket.
The pickles have the format of SGLang's MultiprocessingSerializer: torch replaces a tensor by a
handle of its memory, and SGLang's patch replaces a GPU's index by its UUID, since the index differs
in a process that sees other GPUs.
Source: sglang/srt/utils/patch_torch.py and Engine.update_weights_from_tensor. No GPU has run this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onpolicy.errors import WeightSyncError
from onpolicy.weights import flat
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.push import Engine
from onpolicy.weights.transports.shared_memory import SharedMemoryTransport


class CudaIpcTransport(SharedMemoryTransport):
    """SGLang's update_weights_from_tensor. Every rank of an engine opens the same memory."""

    one_copy = False  # an engine that opens its own GPU's memory copies nothing between GPUs

    def share(self, bucket: WeightBucket) -> Tensor:
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        for name, tensor in bucket:
            if not tensor.is_cuda:
                raise WeightSyncError(
                    f"--weight-sync=ipc: the trainer holds {name} on {tensor.device}, and CUDA IPC "
                    "shares a GPU's memory. Choose --weight-sync tensor."
                )
        monkey_patch_torch_reductions()
        shared = flat.flatten(bucket)
        torch.cuda.synchronize(shared.device)  # engines do not wait for our streams
        return shared

    def close(self, engines: Sequence[Engine], version: int) -> None:
        torch.cuda.ipc_collect()  # free memory that no engine holds open any more
