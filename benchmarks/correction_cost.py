"""Cost of a whole correction of 1,024 sequences x 8,192 tokens, against one forward pass over them.

    python benchmarks/correction_cost.py --hf-checkpoint runs/quickstart/inputs/model [--json FILE]

The forward pass is timed on fewer tokens, at the model's longest context, and scaled: time grows
linearly with tokens (see `onpolicy bench step`), and with longer sequences it would only be slower.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median

from onpolicy.compat.process import prepare_process

prepare_process()  # before torch is imported

import torch

from fallback_correction.config import CorrectionConfig, RejectionRule, Veto
from fallback_correction.correction import correct
from fallback_correction.discrepancy import DiscrepancyConfig, DiscrepancyPenalty
from fallback_correction.mismatch_metrics import estimator_report, mismatch_metrics
from fallback_correction.tokens import TokenBatch
from onpolicy.algorithm.objectives import token_shares
from onpolicy.bench.turns import seconds, take_turns
from onpolicy.cli.command import put_out
from onpolicy.cluster.placement import share_of_cores
from onpolicy.config import TrainConfig, groups
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PackedTokens
from onpolicy.ops import make_operators
from onpolicy.outputs.directory import versions
from onpolicy.run.launch.contracts import contract_for
from onpolicy.training import distributed
from onpolicy.training.fsdp.sharding import load_sharded_policy

SEQUENCES, LENGTH = 1024, 8192
FORWARD_TOKENS = 8192
REPETITIONS = 3

EVERYTHING = CorrectionConfig(
    level="sequence",
    mode="clip",
    lower=0.5,
    rules=(RejectionRule(upper=2.0), RejectionRule(statistic="k3", aggregation="mean", upper=0.1)),
    veto=Veto(lower=1e-4),
    self_normalize=True,
)


def make_batch() -> tuple[TokenBatch, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    n = SEQUENCES * LENGTH
    train = -torch.rand(n, generator=generator)
    rollout = train + 0.01 * torch.randn(n, generator=generator)
    batch = TokenBatch.packed(train, rollout, [LENGTH] * SEQUENCES)
    return batch, torch.randn(SEQUENCES, generator=generator).repeat_interleave(LENGTH)


def correction_parts(
    batch: TokenBatch, advantages: torch.Tensor
) -> dict[str, Callable[[], object]]:
    penalty = DiscrepancyPenalty(DiscrepancyConfig())
    return {
        "correct": lambda: correct(batch, EVERYTHING),
        "shares": lambda: token_shares(batch, "seq-mean-token-mean"),
        "discrepancy": lambda: (penalty.apply(batch, advantages), penalty.step()),
        "mismatch_metrics": lambda: mismatch_metrics(batch),
        "estimator_report": lambda: estimator_report(batch, advantages),
    }


def make_forward(path: str) -> Callable[[], object]:
    distributed.init_process_group()
    config = load_config(path)
    train_config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=path, dtype="bfloat16"),
        parity=groups.ParityConfig(true_on_policy_mode=True),
    )
    contract = contract_for(train_config, config, aligned=True)
    model = load_sharded_policy(
        path,
        make_operators(contract, share_of_cores(1)),
        torch.bfloat16,
        device=torch.device("cpu"),
        activation_checkpointing=False,
        trust_remote_code=False,
        row_parallel_blocks=contract.row_parallel_blocks,
    )
    length = config.max_position_embeddings
    sequences = [[i % config.vocab_size for i in range(length)]] * (FORWARD_TOKENS // length)
    packed = PackedTokens.after_prompts(sequences, [1] * len(sequences), 1.0)

    def forward() -> None:
        torch.set_num_threads(1)  # the aligned operators bring threads of their own
        with torch.no_grad():
            model(packed)
        torch.set_num_threads(share_of_cores(1))

    return forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    batch, advantages = make_batch()
    forward, parts = make_forward(args.hf_checkpoint), correction_parts(batch, advantages)
    torch.set_num_threads(share_of_cores(1))
    measures = {
        name: partial(seconds, part) for name, part in {**parts, "forward": forward}.items()
    }
    runs = take_turns(measures, 1, REPETITIONS)
    medians = {name: median(values) for name, values in runs.items()}
    forward_seconds = medians.pop("forward") * SEQUENCES * LENGTH / FORWARD_TOKENS
    result = {
        "what": "correction of 1024 sequences x 8192 tokens",
        "seconds": medians,
        "total_seconds": sum(medians.values()),
        "forward_seconds": forward_seconds,
        "share_of_forward": sum(medians.values()) / forward_seconds,
        "versions": versions(),
    }
    put_out(result, args.json)


if __name__ == "__main__":
    main()
