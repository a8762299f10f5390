"""Cost of each objective, and of each term beside it, in an optimizer step.

    python -m benchmarks.loss_cost --hf-checkpoint runs/quickstart/inputs/model [--json FILE]

A loss is timed with its backward pass, and with the whole-batch decisions before it, on the
very micro-batches of a step; then the step, with the ordinary loss and with the flags that change more
of it than the loss. Processor seconds, since neighbours of a shared machine take none of them.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from onpolicy.compat.process import prepare_process

prepare_process()  # before torch is imported

from benchmarks.bench.setting import setting
from benchmarks.bench.step import step_measure
from benchmarks.bench.turns import take_turns
from onpolicy.algorithm.registry import OBJECTIVES
from onpolicy.cli.command import put_out
from onpolicy.config import TrainConfig
from onpolicy.config.flags import with_flags
from onpolicy.config.groups import CheckpointConfig
from onpolicy.config.tools import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.ops.log_probs import Scores
from onpolicy.outputs.directory import versions
from onpolicy.run.launch.host_shares import share_of_cores
from onpolicy.train import make_trainer
from onpolicy.train.advantages import RewardEstimator
from onpolicy.train.batch import WeighedBatch
from onpolicy.train.loss import LossSettings, policy_loss
from onpolicy.train.marks import marked
from onpolicy.train.policy_trainer import PolicyTrainer

TERMS: dict[str, dict[str, Any]] = {
    "entropy bonus": {"entropy_coef": 0.01},
    "squared log-ratio": {"log_ratio_coef": 0.01},
    "likelihood of good samples": {"positive_nll_coef": 0.1},
    "top entropy": {"top_entropy_quantile": 0.2},
    "clip-cov": {"clip_cov_ratio": 0.0002},
    "kl-cov": {"kl_cov_ratio": 0.0002},
}
LARGER_STEPS = ("entropy bonus", "top entropy")
"""Terms that change more than the loss: the backward pass of the logits, a forward pass before it, which
is needed where a step has several micro-batches and engines did not tell entropies."""

LAGGING = ("lagging", "top entropy lagging")
CUT_STEPS = (*LARGER_STEPS, "top entropy untold", *LAGGING)

PARTS = 4
"""Micro-batches of a step that is split."""


def processor_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def loss_of(scored: list[tuple[Scores, WeighedBatch]], config: TrainConfig) -> Callable[[], object]:
    """Return a function that computes a step's loss and its gradient by the scores of its
    micro-batches."""
    settings = LossSettings.of(config)

    def loss() -> None:
        batches = marked([batch for _, batch in scored], config, rollout=0)
        for (scores, _), batch in zip(scored, batches, strict=True):
            log_probs, entropy = (x.detach().requires_grad_() for x in scores)
            policy_loss(log_probs, batch, settings, entropy)[0].backward()

    return loss


def scored_step(
    trainer: PolicyTrainer, step: Callable[[], object]
) -> list[tuple[Scores, WeighedBatch]]:
    """Return the scores and the micro-batches of a step, with all fields that any of the terms
    reads."""
    found = []
    plain = trainer.learner._loss

    def loss(scores: Scores, batch: WeighedBatch) -> Any:
        log_probs, entropy = (x.detach() for x in scores)
        found.append((scores, replace(batch, old_log_probs=log_probs, entropy=entropy)))
        return plain(scores, batch)

    trainer.learner._loss = loss  # type: ignore[method-assign]
    step()
    trainer.learner._loss = plain  # type: ignore[method-assign]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--num-tokens", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    threads = share_of_cores(1)
    model = CheckpointConfig(hf_checkpoint=args.hf_checkpoint)
    tokens = (args.num_tokens,)
    bench = BenchConfig(
        what="step", model=model, num_tokens=tokens, prompt_len=32, max_new_tokens=96
    )
    hf_config = load_config(args.hf_checkpoint)
    plain, contract = setting(bench, hf_config, "aligned")

    def step(
        parts: int = 1, *, told: bool = True, lag: int = 0, **algorithm: Any
    ) -> tuple[PolicyTrainer, Callable[[], object]]:
        config = with_flags(plain, {"max_tokens_per_gpu": args.num_tokens // parts, **algorithm})
        trainer = make_trainer(config, contract, threads, RewardEstimator("reinforce"))
        return trainer, step_measure(trainer, args.num_tokens, bench, 1, told=told, lag=lag)

    trainer, ordinary = step()
    terms: dict[str, dict[str, Any]] = {name: TERMS[name] for name in LARGER_STEPS}
    steps = {"step": ordinary, "cut": step(PARTS)[1]}
    steps |= {f"step, {name}": step(**term)[1] for name, term in terms.items()}
    steps |= {f"cut, {name}": step(PARTS, **term)[1] for name, term in terms.items()}
    quantile = TERMS["top entropy"]
    steps["cut, top entropy untold"] = step(PARTS, told=False, **quantile)[1]
    for name, term in zip(LAGGING, ({}, quantile), strict=True):
        steps[f"cut, {name}"] = step(PARTS, lag=1, **term)[1]
    scored = scored_step(trainer, ordinary)
    losses = {name: {"policy_loss": name} for name in OBJECTIVES} | TERMS
    work = steps | {name: loss_of(scored, with_flags(plain, x)) for name, x in losses.items()}
    measures = {name: partial(processor_seconds, each) for name, each in work.items()}
    spent = {k: median(x) for k, x in take_turns(measures, 1, args.repetitions).items()}
    result = {
        "what": "loss",
        "tokens": args.num_tokens,
        "processor_seconds_of_a_step": spent["step"],
        "share_of_a_step": {name: spent[name] / spent["step"] for name in losses},
        "step_with": {name: spent[f"step, {name}"] / spent["step"] for name in LARGER_STEPS},
        "micro_batches_of_a_cut_step": PARTS,
        "cut_step_with": {name: spent[f"cut, {name}"] / spent["cut"] for name in CUT_STEPS},
        "versions": versions(),
    }
    put_out(result, args.json)


if __name__ == "__main__":
    main()
