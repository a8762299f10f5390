"""From a layer's call in transformers to what SGLang's layer tells its attention backend."""

import pytest
import torch
from torch import nn

from onpolicy.errors import ContractError
from onpolicy.ops import ScoreRule
from sglang_patches.cpu_attention import layer_scores
from sglang_patches.layer_attention import attention_forward


class Layer:
    """As much of a RadixAttention as is set and called; of one of two tensor-parallel ranks."""

    tp_q_head_num, tp_k_head_num, tp_v_head_num = 2, 4, 4

    def forward(self, q, k, v, *, forward_batch, **extra):
        self.shapes, self.extra = [x.shape for x in (q, k, v)], extra
        return q


def call(**named):
    layer, module = Layer(), nn.Module()
    module.layer_idx = 3
    q, k, v = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 6)
    attention_forward(
        module, q, k, v, None, attention_instances={3: layer}, forward_batch=None, **named
    )
    return layer


def test_a_layers_window_and_soft_cap_reach_the_backend_as_they_are_meant():
    layer = call(scaling=0.3, sliding_window=32, softcap=50.0, dropout=0.0, is_causal=True)
    # SGLang and FlashAttention-3 count the keys before the query's own.
    assert (layer.sliding_window_size, layer.logit_cap) == (31, 50.0)
    assert layer_scores(layer) == ScoreRule(0.3, window=32, softcap=50.0)
    assert layer.shapes == [(5, 32), (5, 16), (5, 12)] and layer.extra == {}


def test_a_layer_has_the_sizes_of_its_call_and_this_ranks_share_of_the_heads():
    layer = call(sliding_window=None)
    assert (layer.head_dim, layer.qk_head_dim, layer.v_head_dim) == (8, 8, 6)
    assert (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num) == (2, 1, 1)
    assert (layer.sliding_window_size, layer.logit_cap) == (-1, 0.0)
    assert layer_scores(layer) == ScoreRule(8**-0.5)


@pytest.mark.parametrize(
    ("named", "blamed"),
    [
        ({"indices": torch.zeros(1)}, "indices"),
        ({"dropout": 0.1}, "dropout"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(named, blamed):
    with pytest.raises(ContractError, match=f"Module with {blamed}: has no aligned operator"):
        call(**named)
