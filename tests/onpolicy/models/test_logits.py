"""What a model does to its logits, and to its embeddings, is recognised and computed alike."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

from onpolicy.models.align import is_known_embedding, scaled
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import require_alignable
from onpolicy.models.logits import LogitsRule, logits_rule
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.log_probs import token_log_probs
from tests.support.heads import whole_head
from tests.support.tiny import ALL_ARCHITECTURES, SIZES

OPERATORS = CpuOperators(1)
RULES = {
    "qwen3": LogitsRule(), "qwen3-moe": LogitsRule(), "cohere": LogitsRule(factor=0.3),
    "granite": LogitsRule(divisor=3.0), "gemma2": LogitsRule(softcap=30.0),
}  # fmt: skip


def config_of(architecture):
    config_class, sizes = ALL_ARCHITECTURES[architecture]
    config = config_class(**{**SIZES, **sizes})
    config.architectures = [type(empty_causal_lm(config, False)).__name__]
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", RULES)
@torch.no_grad()
def test_a_rule_gives_the_bits_of_the_models_own_code(architecture, dtype):
    model = AutoModelForCausalLM.from_config(config_of(architecture), dtype=dtype)
    rule = logits_rule(model)
    assert rule == RULES[architecture]
    tokens = torch.tensor([[5, 9, 3]])
    plain = model.get_output_embeddings()(model.base_model(tokens).last_hidden_state)
    assert torch.equal(rule.apply(OPERATORS, plain), model(tokens).logits)


def test_what_is_unknown_is_refused(monkeypatch):
    config = config_of("granite")
    own = type(empty_causal_lm(config, False))
    forward = own.forward

    def shifted(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits + 1
        return output

    monkeypatch.setattr(own, "forward", shifted)
    with pytest.raises(Exception, match="what its forward pass does to logits has no aligned"):
        require_alignable(ModelFacts(config), 256)


def test_gradients_go_through_the_rule():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 24, generator=generator) for n in (7, 31))
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    rule, targets = LogitsRule(factor=0.5, softcap=3.0), torch.arange(7)
    temperature = torch.full((7,), 0.7)
    head = whole_head(OPERATORS, weight, finish=lambda logits: rule.apply(OPERATORS, logits))
    got, *_ = token_log_probs(head, hidden, targets, temperature)
    logits = 3 * torch.tanh(0.5 * (hidden @ weight.T) / 3) / 0.7
    want = F.log_softmax(logits, -1)[torch.arange(7), targets]
    torch.testing.assert_close(got, want)
    grad = torch.linspace(-1, 1, 7)
    ours, theirs = (torch.autograd.grad(out, leaves, grad) for out in (got, want))
    torch.testing.assert_close(ours, theirs)


def test_an_embedding_scale_is_rounded_to_the_weights_first():
    embedding = GemmaTextScaledWordEmbedding(5, 4, 0, embed_scale=10.3).bfloat16()
    ids = torch.tensor([[3, 1]])
    rows = F.embedding(ids, embedding.weight)
    assert is_known_embedding(embedding) and is_known_embedding(nn.Embedding(3, 3))
    assert torch.equal(scaled(rows, torch.tensor(10.3)), embedding(ids))


class Shifted(GemmaTextScaledWordEmbedding):
    def forward(self, ids):
        return super().forward(ids) + 1


def test_an_embedding_that_computes_something_else_is_unknown():
    assert not is_known_embedding(Shifted(5, 4, 0, 2.0))
    assert not is_known_embedding(nn.Linear(5, 4))
