"""Penalties on tokens' rewards before advantages: the KL, and overlong answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import fsum
from typing import Any

import torch
from torch import Tensor

from onpolicy.algorithm.kl import kl_estimate
from onpolicy.config import TrainConfig
from onpolicy.train.batch import PackedBatch
from onpolicy.train.distributed import gather_by_number
from onpolicy.train.shares import Outcomes


class Penalties:
    """The penalties that a run's flags select, and the KL coefficient that carries over between
    rollouts."""

    def __init__(self, config: TrainConfig):
        self.algorithm = config.algorithm
        self.longest = config.rollout.rollout_max_response_len
        self.kl_coef = config.algorithm.kl_coef
        self._mean_kl, self._num_samples = 0.0, 0

    @property
    def reads_reference(self) -> bool:
        """Return whether log-probabilities of policy and reference are needed before the loss."""
        return self.algorithm.kl_coef > 0

    def of(
        self,
        batches: Sequence[PackedBatch],
        old: Sequence[Tensor | None],
        reference: Sequence[Tensor | None],
    ) -> tuple[dict[int, list[float]] | None, dict[str, float]]:
        """Return the penalties of this rank's tokens, [R] for each sample number (None: no penalty),
        and metrics; collective.

        old, reference: log-probabilities float32 [R] of each micro-batch, where `reads_reference`.
        """
        if not (self.reads_reference or self.algorithm.overlong_buffer_len):
            return None, {}
        found: dict[int, list[float]] = {}
        metrics: dict[str, float] = {}
        for batch in batches:
            for number, sample in zip(batch.numbers, batch.samples, strict=False):
                length = sample.sample.trajectory.num_sampled
                found[number] = [0.0] * (length - 1) + [self._overlong(length)] * (length > 0)
        if self.reads_reference:
            kl = self._kl(batches, old, reference)
            found = {
                number: [
                    paid + self.kl_coef * x for paid, x in zip(found[number], each, strict=True)
                ]
                for number, each in kl.items()
            }
            metrics = self._measured(kl)
        return found, metrics

    def _overlong(self, length: int) -> float:
        """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), which grows linearly over
        the last tokens."""
        buffer = self.algorithm.overlong_buffer_len
        if not buffer:
            return 0.0
        beyond = length - (self.longest - buffer)
        return max(beyond / buffer * self.algorithm.overlong_penalty_factor, 0.0)

    def _kl(
        self,
        batches: Sequence[PackedBatch],
        old: Sequence[Tensor | None],
        reference: Sequence[Tensor | None],
    ) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for batch, policy, ref in zip(batches, old, reference, strict=True):
            assert policy is not None and ref is not None
            kl = kl_estimate(policy, ref, self.algorithm.kl_penalty)
            kl = torch.where(batch.mask, kl, 0).double()
            parts = kl.cpu().split(batch.response_lens)
            found |= {n: part.tolist() for n, part in zip(batch.numbers, parts, strict=False)}
        return found

    def _measured(self, kl: Mapping[int, Sequence[float]]) -> dict[str, float]:
        means = gather_by_number({n: fsum(x) / max(len(x), 1) for n, x in kl.items()})
        self._mean_kl, self._num_samples = fsum(means.values()) / max(len(means), 1), len(means)
        return {"train/kl_in_reward": self._mean_kl, "train/kl_coef": self.kl_coef}

    def step(self) -> None:
        """Move the coefficient after a rollout so that the KL approaches its target (arXiv 1909.08593,
        section 2.2)."""
        if self.algorithm.kl_ctrl == "adaptive":
            error = min(max(self._mean_kl / self.algorithm.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * self._num_samples / self.algorithm.kl_horizon

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next rollout depends on."""
        return {"kl_coef": self.kl_coef} if self.algorithm.kl_ctrl == "adaptive" else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_coef = float(state.get("kl_coef", self.kl_coef))


def after(outcomes: Outcomes, ours: Mapping[int, Sequence[float]]) -> Outcomes:
    """Return the outcomes of all samples, with the sums of their penalties subtracted; collective."""
    paid = gather_by_number({number: fsum(each) for number, each in ours.items()})
    left = iter(r - paid[number] for number, r in enumerate(chain.from_iterable(outcomes.rewards)))
    rewards = [[next(left) for _ in group] for group in outcomes.rewards]
    return replace(outcomes, rewards=rewards, has_token_rewards=True)
