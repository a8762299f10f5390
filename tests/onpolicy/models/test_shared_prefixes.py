"""Prefixes computed once: the same log-probabilities, and gradients that are the same sum."""

import numpy as np
import pytest
import torch
from torch.distributed._composable import checkpoint
from transformers import AutoModelForCausalLM

from onpolicy.contract import AdapterShape
from onpolicy.models.lora.adapters import adapters, add_adapters
from onpolicy.models.policy import PackedTokens
from onpolicy.models.shared_prefixes import share_prefixes
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.shared_rows import SharedRows
from onpolicy.weights.rounding import is_rounded, round_weight
from tests.onpolicy.models.test_policy import load_policy, random_sequences
from tests.support.tiny import make_checkpoint

PROMPT, OTHER, A, B, C = random_sequences([70, 40, 30, 9, 5])

GROUPS = [
    *(PROMPT + tail for tail in (A, B, C, A)),  # one response was sampled twice
    OTHER + A,
    OTHER + B,
]
AGENT = [PROMPT + A + B, PROMPT + A, PROMPT + A + C, PROMPT + A + C + B, OTHER]


def packed(sequences, **more):
    """All tokens but the first are asked for, as an agent's may be that several trajectories have."""
    asked = [[i > 0 for i in range(len(s))] for s in sequences]
    temperatures = [[0.7] * (len(s) - 1) for s in sequences]
    return PackedTokens.pack(sequences, asked, temperatures, **more)


def scores_and_gradients(policy, batch):
    """Log-probabilities, and the gradients of a loss in which every token has another weight."""
    policy.zero_grad()
    log_probs = policy(batch)[0]
    (log_probs * torch.linspace(-1, 2, len(log_probs))).sum().backward()
    return log_probs.detach(), [p.grad.clone() for p in policy.parameters() if p.grad is not None]


def distance(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe", "adapters"])
def policy(request, tmp_path_factory):
    """Adapters are beside weights in int4, in layers whose activations are recomputed."""
    if request.param != "adapters":
        return load_policy(make_checkpoint(tmp_path_factory.mktemp("model"), request.param))
    policy = load_policy(make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3"))
    with torch.no_grad():
        for name, weight in policy.causal_lm.named_parameters():
            if is_rounded(name, weight):
                weight.copy_(round_weight(weight, "int4"))
    shape = AdapterShape(rank=4, scale=2.0, targets=("down_proj", "q_proj", "v_proj"))
    add_adapters(policy.causal_lm, policy.operators, shape)
    for adapter in adapters(policy):
        torch.nn.init.normal_(adapter.A, std=0.1)
        torch.nn.init.normal_(adapter.B, std=0.1)
    for layer in policy.layers:
        checkpoint(layer)
    return policy


@pytest.mark.parametrize("sequences", [GROUPS, AGENT], ids=["groups", "an agent's branches"])
def test_log_probs_are_the_same_bits_and_gradients_the_same_sum(policy, sequences):
    apart = packed(sequences)
    shared = share_prefixes(apart)
    distinct = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    assert len(shared.tokens) == len(distinct) < len(apart.tokens)
    want, theirs = scores_and_gradients(policy, apart)
    got, ours = scores_and_gradients(policy, shared)
    assert torch.equal(got, want)
    assert distance(ours, theirs) < 1e-6
    again, repeated = scores_and_gradients(policy, share_prefixes(packed(sequences)))
    assert torch.equal(again, got)
    assert all(torch.equal(a, b) for a, b in zip(repeated, ours, strict=True))


def exact_gradients(path, sequences):
    """Transformers' own, in float64, of `scores_and_gradients`' loss, by the names of the weights."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    temperature = torch.tensor(0.7).double()
    scores = [
        (model(torch.tensor([s])).logits[0, :-1] / temperature)
        .log_softmax(-1)
        .gather(1, torch.tensor(s[1:])[:, None])[:, 0]
        for s in sequences
    ]
    log_probs = torch.cat(scores)
    (log_probs * torch.linspace(-1, 2, len(log_probs)).double()).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def errors(policy, batch, exact):
    """The gradients of every weight, flat and in float64, and how far they are from the exact ones."""
    scores_and_gradients(policy, batch)
    weights = {n: p for n, p in policy.causal_lm.named_parameters() if p.grad is not None}
    found = {name: p.grad.double().flatten() for name, p in weights.items()}
    return found, {name: float((g - exact[name].flatten()).norm()) for name, g in found.items()}


ROUNDING = 1.5
"""Two float32 sums of the same numbers are at most so many times as far from each other, and one of them
from float64, as the other is from float64."""


@pytest.mark.parametrize("architecture", ["gemma4-moe", "gpt-oss", "qwen3-moe"])
def test_gradients_are_no_farther_from_exact_ones_than_those_of_whole_sequences(
    architecture, tmp_path, monkeypatch
):
    """In single tensors whose sums cancel (sinks, biases of keys) float32 has fewer digits than
    `distance` below asks for, with and without sharing."""
    path = make_checkpoint(tmp_path, architecture)
    policy, exact = load_policy(path), exact_gradients(path, AGENT)
    apart, shared = packed(AGENT), share_prefixes(packed(AGENT))
    theirs, far = errors(policy, apart, exact)
    ours, near = errors(policy, shared, exact)
    assert distance([torch.cat([*ours.values()])], [torch.cat([*theirs.values()])]) < 1e-6
    assert all(float((ours[n] - theirs[n]).norm()) < ROUNDING * far[n] for n in far)
    assert all(near[n] < ROUNDING * far[n] for n in far)
    monkeypatch.setattr(SharedRows, "add_up", rounded_as_it_grows)
    _, rounded = errors(policy, shared, exact)
    assert any(rounded[n] > ROUNDING * far[n] for n in far)


def test_threads_change_no_bit_of_a_gradient(policy, monkeypatch):
    monkeypatch.setattr("onpolicy.ops.cpu.threads.MIN_PARALLEL_FLOPS", 0)
    _, ours = scores_and_gradients(policy, share_prefixes(packed(GROUPS)))
    policy.use(CpuOperators(3))
    _, of_three = scores_and_gradients(policy, share_prefixes(packed(GROUPS)))
    policy.use(CpuOperators(1))
    assert all(torch.equal(a, b) for a, b in zip(of_three, ours, strict=True))


def rounded_as_it_grows(self, grad, count):
    total = grad.new_zeros(count, *grad.shape[1:])
    for read, lie in self.runs:
        total[lie] = (total[lie] + grad[read]).bfloat16().float()
    return total


def experts_of(sequence, seed):
    """Two of six experts in each of two layers, of all tokens but the last."""
    generator = np.random.default_rng(seed)
    chosen = [generator.permutation(6)[:2] for _ in range(2 * (len(sequence) - 1))]
    return np.array(chosen, dtype=np.int32).reshape(len(sequence) - 1, 4)


def test_tokens_are_shared_that_take_the_same_experts(tmp_path):
    policy = load_policy(make_checkpoint(tmp_path, "qwen3-moe"))
    first = experts_of(PROMPT + A, seed=0)
    second = np.concatenate([first[: len(PROMPT)], experts_of([*B, 0], seed=1)[:-1]])
    third = experts_of(PROMPT + C, seed=2)
    sequences = [PROMPT + A, PROMPT + B, PROMPT + C]
    apart = packed(sequences, routed_experts=[first, second, third])
    shared = share_prefixes(apart)
    assert len(shared.tokens) == len(PROMPT) + len(A) + len(B) + len(third) + 1
    with torch.no_grad():
        want = policy(apart)[0]
        assert torch.equal(policy(shared)[0], want)
        assert policy.replay.counts()["routing/num_replayed"] == 2 * (len(shared.tokens) - 3)
        own = policy(apart.with_own_routing())[0]
        assert torch.equal(policy(shared.with_own_routing())[0], own)
        assert not torch.equal(own, want)


def test_sequences_that_share_nothing_stay_as_they_are():
    batch = packed([A, B])
    assert share_prefixes(batch) is batch
