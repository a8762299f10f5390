"""One of our Megatron modules at a time, broken so that it differs on every CPU.

Most give the next larger number everywhere, the smallest violation there is. Megatron's own modules
are no controls: whether their kernels round otherwise is up to the machine.
"""

import pkgutil
from unittest.mock import patch

import torch

from tests.support.violations import next_up

MEGATRON = "onpolicy.training.megatron"
OFF_BY_ONE_BIT = {
    "column_linear": (f"{MEGATRON}.modules.AlignedColumnLinear", "_forward_impl"),
    "row_linear": (f"{MEGATRON}.modules.AlignedRowLinear", "forward"),
    "norm": (f"{MEGATRON}.modules.AlignedNorm", "forward"),
    "joined_norm": (f"{MEGATRON}.modules.JoinedHeadsNorm", "forward"),
    "norm_after": (f"{MEGATRON}.modules.NormedRowLinear", "forward"),
    "whole_linear": (f"{MEGATRON}.modules.WholeLinear", "forward"),
    "shared_expert": (f"{MEGATRON}.moe.AlignedMoeLayer", "_with_shared"),
    "attention": (f"{MEGATRON}.modules.AlignedAttention", "forward"),
    "rotated_part": (f"{MEGATRON}.modules", "_rotated_part"),
    "gated": ("onpolicy.ops.base.Operators", "gated"),
    "output_layer": ("onpolicy.models.policy", "token_log_probs"),
    "router": (f"{MEGATRON}.moe.AlignedMoeLayer", "_route"),
    "experts": (f"{MEGATRON}.moe.AlignedExperts", "forward"),
}
"""A function, or a method of all instances, whose (first) result is rounded up."""


def broken(name):
    """A context in which one of OFF_BY_ONE_BIT, or of the functions below, is broken."""
    if name not in OFF_BY_ONE_BIT:
        return globals()[name]()
    place, function = OFF_BY_ONE_BIT[name]
    owner = pkgutil.resolve_name(place)
    right = getattr(owner, function)

    def rounded_up(*args, **kwargs):
        result = right(*args, **kwargs)
        return (next_up(result[0]), *result[1:]) if isinstance(result, tuple) else next_up(result)

    return patch.object(owner, function, rounded_up)


def rounded_parts():
    """Every rank's part of a sum over K is rounded to bfloat16, as an all-reduce would have it."""
    from onpolicy.ops.row_parallel import RowParallel

    right = RowParallel.sum

    def rounded(self, partials):
        return right(self, [partial.bfloat16().float() for partial in partials])

    return patch.object(RowParallel, "sum", rounded)


def rotary():
    """Megatron's own, which counts positions through the pack and knows no RoPE scaling."""
    from onpolicy.training.megatron.gpt_model import PolicyGptModel

    localize = PolicyGptModel.localize

    def in_pack(self, batch):
        local = localize(self, batch)
        local.angles = self.rotary(local.angles[0], torch.arange(local.tokens.shape[1])[None])
        return local

    return patch.object(PolicyGptModel, "localize", in_pack)


def rotated_everywhere():
    """Also in the layers that do without."""
    return patch(f"{MEGATRON}.modules.is_rotated", lambda *_: True)
