"""What the layers of a model ask of their attention, and that they get what transformers means by it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import require_alignable
from onpolicy.models.policy import PackedTokens, empty_policy
from onpolicy.models.size import operator_shapes
from onpolicy.ops.cpu import CpuOperators
from tests.support.tiny import make_checkpoint

ASKED = {
    "qwen3": [(None, None, False)] * 2,
    "mistral-window": [(24, None, False)] * 2,
    "qwen2-window": [(24, None, False), (None, None, False)],
    "gemma2": [(24, 50.0, False), (None, 50.0, False)],
    "gemma3": [(24, None, False), (None, None, False)],
    "cohere2": [(24, None, False), (None, None, False)],
    "olmo3": [(24, None, False), (None, None, False)],
    "gpt-oss": [(24, None, True), (None, None, True)],
    "gemma4": [(24, None, False), (None, None, False)] * 2,
    "llama4": [(None, None, False)] * 2,
}
"""Of each layer: window, soft cap, whether it has sinks."""


@pytest.mark.parametrize("architecture", ASKED)
def test_layers_get_what_transformers_means(architecture, tmp_path):
    path = make_checkpoint(tmp_path, architecture)
    config = AutoConfig.from_pretrained(path)
    facts = ModelFacts(config)
    require_alignable(facts, 256)
    layers = facts.attention
    assert [(x.window, x.softcap, x.sinks) for x in layers] == ASKED[architecture]
    assert operator_shapes(facts).attention == tuple(dict.fromkeys(layers))
    stock = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    policy = empty_policy(config, CpuOperators(1))
    policy.causal_lm.load_state_dict(stock.state_dict(), assign=True)
    policy.causal_lm.tie_weights()
    sequence = torch.randint(2, 137, (90,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, *_ = policy(PackedTokens.after_prompts([sequence.tolist()], [1], 1.0))
        want = stock(sequence[None]).logits[0, :-1].log_softmax(-1).gather(1, sequence[1:, None])
    torch.testing.assert_close(got, want[:, 0], rtol=1e-3, atol=1e-3)
