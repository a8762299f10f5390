"""Experts of the rollout in place of the router's own."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from onpolicy.models.expert_layers import RoutingReplay, can_be_replayed
from onpolicy.models.facts import ModelFacts
from onpolicy.models.policy import PackedTokens, empty_policy
from onpolicy.ops.cpu import CpuOperators
from tests.support.tiny import make_checkpoint

SEQUENCES = [[5, 9, 3, 7, 11], [4, 8, 2]]
PROMPTS = [2, 1]
LAYERS, K, EXPERTS = 2, 2, 6


def make_policy(directory, architecture="qwen3-moe"):
    path = make_checkpoint(directory, architecture)
    config = AutoConfig.from_pretrained(path)
    policy = empty_policy(config, CpuOperators(1))
    weights = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    policy.causal_lm.load_state_dict(weights, assign=True, strict=False)
    return policy


def other_experts(seed=0):
    """Random choices of distinct experts for every token but the last."""
    rng = np.random.default_rng(seed)
    return [
        np.stack(
            [
                np.concatenate([rng.permutation(EXPERTS)[:K] for _ in range(LAYERS)])
                for _ in range(len(sequence) - 1)
            ]
        ).astype(np.int32)
        for sequence in SEQUENCES
    ]


def score(policy, experts=()):
    return policy(PackedTokens.after_prompts(SEQUENCES, PROMPTS, 1.0, experts))[0]


def own_experts(policy):
    """What the routers choose by themselves, in the shape in which a rollout returns it."""
    seen = []

    class Watch(RoutingReplay):
        def choose(self, layer, num_experts, own, candidates):
            seen.append(own.reshape(-1, K))
            return own

    import onpolicy.models.policy as module

    original = module.RoutingReplay
    module.RoutingReplay = Watch
    try:
        score(policy, other_experts())
    finally:
        module.RoutingReplay = original
    flat = torch.cat(seen, dim=1).to(torch.int32).numpy()
    lens = [len(sequence) for sequence in SEQUENCES]
    return [part[:-1] for part in np.split(flat, np.cumsum(lens)[:-1])]


def test_the_own_choice_replayed_changes_no_bit(tmp_path):
    policy = make_policy(tmp_path)
    own = own_experts(policy)
    assert torch.equal(score(policy, own), score(policy))
    score(policy, own)
    counts = policy.replay.counts()
    tokens = sum(len(sequence) - 1 for sequence in SEQUENCES)
    assert counts["routing/num_replayed"] == tokens * LAYERS
    assert counts["routing/num_differing"] == 0


def test_another_choice_is_followed_and_counted(tmp_path):
    policy = make_policy(tmp_path)
    assert not torch.equal(score(policy, other_experts()), score(policy))
    score(policy, other_experts())
    assert policy.replay.counts()["routing/num_differing"] > 0


@pytest.mark.parametrize(
    ("architecture", "sparse_layers"),
    [("olmoe", 2), ("gpt-oss", 2), ("ernie4.5-moe", 1), ("deepseek-v2", 1), ("deepseek-v3", 1)],
)
def test_routers_of_every_kind_follow(tmp_path, architecture, sparse_layers):
    policy = make_policy(tmp_path, architecture)
    config = policy.causal_lm.config
    assert can_be_replayed(ModelFacts(config))
    k = config.num_experts_per_tok
    other = [np.tile(np.arange(k, dtype=np.int32), (len(s) - 1, LAYERS)) for s in SEQUENCES]
    plain, replayed = score(policy), score(policy, other)
    assert replayed.isfinite().all() and not torch.equal(replayed, plain)
    tokens = sum(len(sequence) - 1 for sequence in SEQUENCES)
    assert policy.replay.counts()["routing/num_replayed"] == tokens * sparse_layers


@pytest.mark.parametrize("architecture", ["phimoe", "qwen3"])
def test_routers_that_choose_in_another_way_are_told(architecture, tmp_path):
    config = AutoConfig.from_pretrained(make_checkpoint(tmp_path, architecture))
    assert can_be_replayed(ModelFacts(config)) == (architecture == "qwen3")  # which has none


def test_the_order_of_the_experts_is_no_difference():
    replay = RoutingReplay(torch.tensor([[3, 1]]), 2)
    assert replay.choose(0, 6, torch.tensor([[1, 3]]), 6).tolist() == [[3, 1]]
    assert replay.counts()["routing/num_differing"] == 0


def test_a_choice_among_groups_of_experts_stays():
    replay = RoutingReplay(torch.tensor([[3, 1]]), 2)
    assert replay.choose(0, 6, torch.tensor([[0, 1]]), 3).tolist() == [[0, 1]]


def test_a_sequence_without_known_experts_takes_its_own(tmp_path):
    policy = make_policy(tmp_path)
    known = [other_experts()[0], None]
    mixed, plain = score(policy, known), score(policy)
    first = len(SEQUENCES[0]) - PROMPTS[0]
    assert torch.equal(mixed[first:], plain[first:])
    assert not torch.equal(mixed[:first], plain[:first])


def test_the_next_forward_pass_without_experts_is_free_again(tmp_path):
    policy = make_policy(tmp_path)
    before = score(policy)
    score(policy, other_experts())
    assert torch.equal(score(policy), before)


def test_gate_values_are_the_trainers_own_with_gradient(tmp_path):
    policy = make_policy(tmp_path)
    score(policy, other_experts()).sum().backward()
    grads = [p.grad for n, p in policy.named_parameters() if n.endswith("mlp.gate.weight")]
    assert len(grads) == LAYERS
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads)
