"""Megatron's and PyTorch's own modules in place of ours, one at a time.

Linears and activations are called as in a decode step, a row at a time: in one batch on one thread
PyTorch's own happen to give these rows the same bits.
"""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.nn.functional as F

from onpolicy.ops.stock import StockOperators


def column_linear():
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from onpolicy.train.megatron.linears import AlignedColumnLinear

    def by_rows(self, input, *args, **kwargs):
        stock = ColumnParallelLinear._forward_impl
        return torch.cat([stock(self, row, *args, **kwargs) for row in input.split(1)])

    return patch.object(AlignedColumnLinear, "_forward_impl", by_rows)


def row_linear():
    from megatron.core.tensor_parallel import RowParallelLinear

    from onpolicy.train.megatron.linears import AlignedRowLinear

    def by_rows(self, input):
        outputs = [RowParallelLinear.forward(self, row)[0] for row in input.split(1)]
        return torch.cat(outputs), None

    return patch.object(AlignedRowLinear, "forward", by_rows)


def norm():
    from onpolicy.train.megatron.norm import AlignedNorm

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    return patch.object(AlignedNorm, "forward", forward)


def attention():
    from onpolicy.train.megatron.attention import AlignedAttention

    stock = StockOperators(1).attention
    return patch.object(AlignedAttention, "forward", _with(AlignedAttention, "attention", stock))


def rotary():
    """Megatron's own, which counts positions through the pack and knows no RoPE scaling."""
    from onpolicy.train.megatron.model import PolicyGptModel

    localize = PolicyGptModel.localize

    def in_pack(self, batch):
        local = localize(self, batch)
        local.angles = self.rotary(local.angles[0], torch.arange(local.tokens.shape[1])[None])
        return local

    return patch.object(PolicyGptModel, "localize", in_pack)


def activation():
    from onpolicy.train.megatron.config import AlignedConfig

    def by_rows(self, x):
        return torch.cat([self.activation(row) for row in x.split(1)])

    return patch.object(AlignedConfig, "_activate", by_rows)


def output_layer():
    """Megatron's cross entropy over a shared vocabulary: sums of the ranks' sums."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from onpolicy.train.megatron import model

    def log_probs(operators, hidden, weight, bias, targets, temperature, vocabulary):
        columns = torch.arange(len(weight)) + vocabulary.group.rank() * len(weight)
        logits = operators.linear(hidden, weight) / temperature[:, None]
        logits = logits.masked_fill(columns >= vocabulary.size, float("-inf"))
        loss = vocab_parallel_cross_entropy(logits[:, None], targets[:, None])[:, 0]
        return -loss, torch.zeros_like(loss)

    return patch.object(model, "token_log_probs", log_probs)


def router():
    from onpolicy.train.megatron.moe import AlignedRouter

    def by_rows(x, weight, bias=None):
        return torch.cat([F.linear(row, weight, bias) for row in x.split(1)])

    return patch.object(AlignedRouter, "forward", _with(AlignedRouter, "linear", by_rows))


def experts():
    """Hugging Face's own loop over experts, which adds up a token's in the order of the experts."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from onpolicy.train.megatron.moe import AlignedExperts

    def forward(self, x, weights, chosen):
        stock = Qwen3MoeExperts(self.config.hf_config)
        stock.gate_up_proj.data = self.gate_up.data.flatten(1, 2)
        stock.down_proj.data = self.down.data
        return Qwen3MoeExperts.forward.__wrapped__(stock, x, chosen, weights)

    return patch.object(AlignedExperts, "forward", forward)


def _with(kind, operator, function):
    """The method `forward` of a class, while one of the operators is another function."""
    forward = kind.forward

    def changed(self, *args, **kwargs):
        with patch.object(self.config.operators, operator, function):
            return forward(self, *args, **kwargs)

    return changed
