"""Styles of tensor-parallel plans as SGLang and this project read them, and heads that ranks share."""

import pytest
import torch
from sglang.srt.models import transformers as backend

from onpolicy.models.tensor_parallel import STYLES, engine_style
from sglang_patches import tensor_parallel
from sglang_patches.tensor_parallel import own_part

OURS = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}


@pytest.mark.parametrize("style", STYLES)
def test_a_style_that_sglang_knows_is_read_as_it_reads_it(style):
    if style in OURS:
        assert engine_style(style) == OURS[style]
    else:
        assert engine_style(style) == backend._normalize_tp_style(style)


@pytest.mark.parametrize("style", ["mla_kv_a_proj", "anything"])
def test_layers_of_another_style_stay_whole(style):
    assert engine_style(style) == "replicate"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_own_heads_out_of_all_of_them(rank, monkeypatch):
    class Group:
        world_size, rank_in_group = 2, rank

    monkeypatch.setattr(tensor_parallel, "_group", Group)
    x = torch.arange(12).view(2, 6)
    assert torch.equal(own_part(x, 3), x[:, 3 * rank : 3 * rank + 3])
    assert own_part(x, 6) is x
