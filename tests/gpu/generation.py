"""Generation with a paged model in batches of changing composition, and scoring with the trainer's."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3MoeConfig

from onpolicy.models.policy import PackedTokens

MODELS = ("qwen3", "qwen3-tied", "qwen3-moe")

CHUNK = 48
"""Prompt tokens of a sequence in one prefill step."""


@dataclass(frozen=True, slots=True)
class Rollout:
    prompt_lens: list[int]
    sequences: list[list[int]]
    log_probs: list[Tensor]
    """float32 [tokens of the response], one entry a sequence"""


def make_config(name, shape):
    sizes = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "initializer_range": 0.08,
        "tie_word_embeddings": name == "qwen3-tied",
    }
    if name != "qwen3-moe":
        return Qwen3Config(**sizes)
    return Qwen3MoeConfig(
        **sizes,
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        moe_intermediate_size=shape.intermediate,
        norm_topk_prob=True,
    )


def random_prompts(setting, seed):
    """Return prompts of random lengths: one of one token, one longer than a prefill chunk."""
    rng = random.Random(seed)
    longest = setting.longest_prompt
    lens = [1, longest, *(rng.randrange(1, longest + 1) for _ in range(setting.sequences - 2))]
    return [[rng.randrange(setting.small_model.vocab) for _ in range(n)] for n in lens]


def generate(model, prompts, new_tokens, temperature, seed):
    """Prefill in chunks, then decode a random part of the sequences at a time."""
    rng = random.Random(seed)
    sequences = [list(prompt) for prompt in prompts]
    log_probs = [[] for _ in prompts]
    cached = [0] * len(prompts)
    while active := [i for i in range(len(prompts)) if len(log_probs[i]) < new_tokens]:
        batch = rng.sample(active, rng.randrange(1, len(active) + 1))
        if rng.random() < 0.5:
            batch = active
        parts = [sequences[i][cached[i] : cached[i] + CHUNK] for i in batch]
        hidden = model.extend(batch, parts, [cached[i] for i in batch])
        for i, part in zip(batch, parts, strict=True):
            cached[i] += len(part)
        ready = [j for j, i in enumerate(batch) if cached[i] == len(sequences[i])]
        if not ready:
            continue
        t = torch.full((len(ready), 1), temperature, device=model.device)
        rows = model.log_probs(hidden[torch.tensor(ready, device=model.device)], t)
        uniform = torch.tensor([rng.random() for _ in ready], dtype=torch.float64)
        tokens = model.policy.operators.sample(rows, uniform.to(model.device))
        for row, token, j in zip(rows, tokens.tolist(), ready, strict=True):
            sequences[batch[j]].append(token)
            log_probs[batch[j]].append(row[token])
    return Rollout(
        [len(prompt) for prompt in prompts],
        sequences,
        [torch.stack(values) for values in log_probs],
    )


def pack(rollout, order, temperature, device):
    return PackedTokens.after_prompts(
        [rollout.sequences[i] for i in order], [rollout.prompt_lens[i] for i in order], temperature
    ).on(device)


def score(policy, rollout, temperature, device, seed):
    """Return the trainer's log-probabilities, sequence by sequence, in micro-batches of its own."""
    order = list(range(len(rollout.sequences)))
    random.Random(seed).shuffle(order)
    cut = len(order) // 3
    scored = {}
    for part in (order[:cut], order[cut:]):
        flat, *_ = policy(pack(rollout, part, temperature, device))
        lens = [len(rollout.log_probs[i]) for i in part]
        scored.update(zip(part, flat.split(lens), strict=True))
    return [scored[i] for i in range(len(order))]
