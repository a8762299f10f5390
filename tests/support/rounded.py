"""What engines compute with where weights are rounded, made from what they are before."""

import torch

from onpolicy.weights.rounding import is_rounded, round_weight


def deployed(masters, weight_format="int3", dtype=torch.bfloat16, pushed=torch.bfloat16):
    """By the names of a checkpoint, in the dtype that is `pushed`, rounded from `dtype`."""
    return {
        name: (
            round_weight(tensor.to(dtype), weight_format)
            if is_rounded(name, tensor)
            else tensor.to(dtype)
        ).to(pushed)
        for name, tensor in masters.items()
    }
