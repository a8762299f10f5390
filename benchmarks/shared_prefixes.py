"""Gain from computing shared prefixes once: an optimizer step with and without, in turns.

    python -m benchmarks.shared_prefixes [--layers 4] [--repetitions 3] [--only agent] [--json FILE]

A model of random weights of Qwen3's form, with a hidden size of 1,024, takes steps of AdamW
in float32, each over one micro-batch. `speed` is the median of neighbours' seconds without by seconds
with, `processor` the same of the process's own time, which others on the machine disturb less; `limit`
is tokens by distinct tokens. Activations are what autograd keeps for the backward pass.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from onpolicy.compat.process import prepare_process

prepare_process()  # before torch is imported

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from transformers import AutoModelForCausalLM, Qwen3Config

from onpolicy.bench.turns import take_turns
from onpolicy.cli.command import put_out
from onpolicy.cluster.placement import share_of_cores
from onpolicy.models.policy import PackedTokens, PolicyModel, empty_policy
from onpolicy.models.shared_prefixes import share_prefixes
from onpolicy.ops.cpu import CpuOperators
from onpolicy.outputs.directory import versions

VOCAB = 8192


class Seconds(NamedTuple):
    wall: float
    processor: float


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


def group(prompt: int, response: int, n: int) -> tuple[list[list[int]], list[int]]:
    """Return sequences, and the number of each one's first tokens that are not scored."""
    return [tokens(prompt, 0) + tokens(response, i + 1) for i in range(n)], [prompt] * n


def agent(turns: int, turn: int, branches: int) -> tuple[list[list[int]], list[int]]:
    """Return one trajectory for each turn of each branch, as for agents that resend their past;
    branches diverge after half of the turns."""
    trunk = [tokens(turn, i) for i in range(turns // 2)]
    paths = [
        trunk + [tokens(turn, 100 * (b + 1) + i) for i in range(turns - len(trunk))]
        for b in range(branches)
    ]
    whole = [[x for part in path[: i + 1] for x in part] for path in paths for i in range(turns)]
    distinct = list(map(list, dict.fromkeys(map(tuple, whole))))
    return distinct, [len(s) - turn // 2 for s in distinct]


CASES = {
    "group of 8, prompt 2,048, responses 256": partial(group, 2048, 256, 8),
    "group of 8, prompt 512, responses 256": partial(group, 512, 256, 8),
    "group of 8, prompt 64, responses 256": partial(group, 64, 256, 8),
    "group of 2, prompt 2,048, responses 256": partial(group, 2048, 256, 2),
    "group of 4, prompt 2,048, responses 256": partial(group, 2048, 256, 4),
    "group of 16, prompt 2,048, responses 256": partial(group, 2048, 256, 16),
    "agent of 8 turns of 128 tokens, 4 branches": partial(agent, 8, 128, 4),
}


def make_model(layers: int) -> PolicyModel:
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    weights = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    policy = empty_policy(config, CpuOperators(share_of_cores(1)))
    policy.causal_lm.load_state_dict(weights, strict=False, assign=True)
    return policy


def step(policy: PolicyModel, optimizer: Optimizer, batch: PackedTokens) -> Seconds:
    """Run a forward pass, a backward pass and the update of the weights."""
    wall, processor = time.perf_counter(), time.process_time()
    optimizer.zero_grad()
    policy(batch)[0].mean().backward()
    optimizer.step()
    return Seconds(time.perf_counter() - wall, time.process_time() - processor)


def activations(policy: PolicyModel, batch: PackedTokens) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, weights excluded."""
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        policy(batch)
    return sum(kept.values())


def compare(
    policy: PolicyModel, sequences: list[list[int]], prompts: list[int], repetitions: int
) -> dict[str, Any]:
    """Compare steps over the sequences; `prompts`: the number of each one's first tokens that are
    not scored."""
    apart = PackedTokens.after_prompts(sequences, prompts, 1.0)
    shared = share_prefixes(apart)
    with torch.no_grad():
        assert torch.equal(policy(shared)[0], policy(apart)[0])
    kept = [activations(policy, batch) for batch in (apart, shared)]
    optimizer = AdamW(policy.parameters(), lr=1e-6)
    batches = {"apart": apart, "shared": shared}
    measures = {name: partial(step, policy, optimizer, batch) for name, batch in batches.items()}
    runs = take_turns(measures, 0, repetitions)  # the passes above have warmed both up
    pairs = [*zip(runs["apart"], runs["shared"], strict=True)]
    return {
        "tokens": len(apart.tokens),
        "distinct_tokens": len(shared.tokens),
        "limit": len(apart.tokens) / len(shared.tokens),
        "speed": median(a.wall / b.wall for a, b in pairs),
        "processor": median(a.processor / b.processor for a, b in pairs),
        "activations": kept[1] / kept[0],
        "seconds": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", default="", help="measure the cases whose names have this")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    policy, found = make_model(args.layers), {}
    for case in CASES:
        if args.only in case:
            found[case] = compare(policy, *CASES[case](), args.repetitions)
            print(case, found[case], flush=True)
    put_out({"layers": args.layers, "cases": found, "versions": versions()}, args.json)


if __name__ == "__main__":
    main()
