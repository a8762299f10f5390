"""One of our Megatron modules at a time, broken so that it differs on every CPU.

Most give the next larger number everywhere, the smallest violation there is. Megatron's own modules
are no controls: whether their kernels round otherwise is up to the machine.
"""

from __future__ import annotations

from unittest.mock import patch

import torch

from tests.support.violations import next_up


def column_linear():
    from onpolicy.train.megatron.modules import AlignedColumnLinear

    return _off_by_one_bit(AlignedColumnLinear, "_forward_impl")


def row_linear():
    from onpolicy.train.megatron.modules import AlignedRowLinear

    return _off_by_one_bit(AlignedRowLinear)


def rounded_parts():
    """Every rank's part of a sum over K is rounded to bfloat16, as an all-reduce would have it."""
    from onpolicy.ops.row_parallel import RowParallel

    right = RowParallel.sum

    def rounded(self, partials):
        return right(self, [partial.bfloat16().float() for partial in partials])

    return patch.object(RowParallel, "sum", rounded)


def norm():
    from onpolicy.train.megatron.modules import AlignedNorm

    return _off_by_one_bit(AlignedNorm)


def joined_norm():
    from onpolicy.train.megatron.modules import JoinedHeadsNorm

    return _off_by_one_bit(JoinedHeadsNorm)


def norm_after():
    from onpolicy.train.megatron.modules import NormedRowLinear

    return _off_by_one_bit(NormedRowLinear)


def whole_linear():
    from onpolicy.train.megatron.modules import WholeLinear

    return _off_by_one_bit(WholeLinear)


def shared_expert():
    from onpolicy.train.megatron.moe import AlignedMoeLayer

    return _off_by_one_bit(AlignedMoeLayer, "_with_shared")


def attention():
    from onpolicy.train.megatron.attention import AlignedAttention

    return _off_by_one_bit(AlignedAttention)


def rotary():
    """Megatron's own, which counts positions through the pack and knows no RoPE scaling."""
    from onpolicy.train.megatron.model import PolicyGptModel

    localize = PolicyGptModel.localize

    def in_pack(self, batch):
        local = localize(self, batch)
        local.angles = self.rotary(local.angles[0], torch.arange(local.tokens.shape[1])[None])
        return local

    return patch.object(PolicyGptModel, "localize", in_pack)


def rotated_everywhere():
    """Also in the layers that do without."""
    from onpolicy.train.megatron import attention

    return patch.object(attention, "is_rotated", lambda *_: True)


def rotated_part():
    from onpolicy.train.megatron import attention

    return _off_by_one_bit(attention, "_rotated_part")


def gated():
    from onpolicy.ops.base import Operators

    return _off_by_one_bit(Operators, "gated")


def output_layer():
    from onpolicy.models import scoring

    return _off_by_one_bit(scoring, "token_log_probs")


def router():
    from onpolicy.train.megatron.moe import AlignedMoeLayer

    return _off_by_one_bit(AlignedMoeLayer, "_route")


def experts():
    from onpolicy.train.megatron.moe import AlignedExperts

    return _off_by_one_bit(AlignedExperts)


def _off_by_one_bit(owner, name="forward"):
    """A function, or a method of all instances, whose (first) result is rounded up."""
    right = getattr(owner, name)

    def broken(*args, **kwargs):
        result = right(*args, **kwargs)
        if isinstance(result, tuple):
            return next_up(result[0]), *result[1:]
        return next_up(result)

    return patch.object(owner, name, broken)
