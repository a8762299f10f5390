"""Supervised learning from given answers, with the trainer's models, batches and optimizer steps.

The functions are for `Trainer.on_each_rank`. The tokens that a trajectory marks as sampled are trained
on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from onpolicy.ops.log_probs import Scores
from onpolicy.training import distributed
from onpolicy.training.batch import MicroBatch, packed_batch, sharing
from onpolicy.training.engine import optimizer_step
from onpolicy.training.loss import weighted_sum
from onpolicy.training.policy_trainer import PolicyTrainer
from onpolicy.training.shares import make_shares
from onpolicy.types import Sample
from onpolicy.weights.digest import WeightDigest

GATHERED_BYTES = 256 << 20
"""Bytes of weights that are gathered at a time for their digest."""


def supervised_step(
    trainer: PolicyTrainer, samples: Sequence[Sample], rate: float
) -> dict[str, float]:
    """Take one optimizer step on all samples; return its metrics, the same on every rank."""
    start = time.perf_counter()
    batches = supervised_batches(trainer, samples)
    metrics, _ = optimizer_step(trainer.policy, batches, negative_log_likelihood, None, rate)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(s.trajectory.token_ids) for s in samples)
    return {
        **metrics,
        **sharing([batches], trainer.config.trainer.shares_prefixes),
        "perf/train_time": seconds,
        "perf/train_tokens_per_second": num_tokens / seconds,
    }


def supervised_loss(trainer: PolicyTrainer, samples: Sequence[Sample]) -> float:
    """Return the loss of the current policy, in nats per token; the same on every rank."""
    batches = supervised_batches(trainer, samples)
    scores = trainer.policy.score([batch.packed for batch in batches])
    losses = [
        {"loss": float(negative_log_likelihood(each, batch)[0])}
        for each, batch in zip(scores, batches, strict=True)
    ]
    return distributed.sum_micro_batches(losses)["loss"]


def supervised_batches(trainer: PolicyTrainer, samples: Sequence[Sample]) -> list[MicroBatch]:
    """Return this rank's micro-batches, with the share 1 / (number of trained tokens of all ranks) for
    each token."""
    flags = trainer.config.trainer
    most, shares = flags.max_tokens_per_gpu, flags.shares_prefixes
    plan = make_shares(samples, 1, distributed.data_size(), most, shares)
    (parts,) = plan[distributed.data_rank()]
    weight = 1 / max(sum(s.trajectory.num_sampled for s in samples), 1)
    batches = [packed_batch(each, trainer.device, shares) for each in parts]
    return [
        replace(
            batch,
            advantages=torch.ones_like(batch.rollout_log_probs),
            shares=batch.mask * weight,
            kept=batch.mask,
            importance_weights=torch.ones_like(batch.rollout_log_probs),
        )
        for batch in batches
    ]


def negative_log_likelihood(scores: Scores, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's part of the mean over the global batch's tokens, and of the metrics."""
    loss = weighted_sum(-scores.log_probs, batch.shares)
    entropy = weighted_sum(scores.entropy.detach(), batch.shares)
    return loss, {"train/loss": loss.detach(), "train/entropy": entropy}


def policy_digest(trainer: PolicyTrainer) -> str:
    """Return the digest of the policy's weights in the compute dtype, as of a push; on rank 0."""
    digest = WeightDigest()
    for bucket in trainer.policy.weight_buckets(GATHERED_BYTES):
        for name, tensor in bucket:
            digest.add(name, tensor)
    return digest.hexdigest()
