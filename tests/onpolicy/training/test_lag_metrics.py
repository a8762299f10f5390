"""Metrics of stale tokens, by lag."""

import math

import pytest
import torch

from fallback_correction.tokens import TokenBatch
from onpolicy.training.batch import packed_batch
from onpolicy.training.rollout_correction import lag_metrics
from onpolicy.trajectory import Span
from tests.onpolicy.training.test_parity_gate import lagging
from tests.support.onpolicy_batches import scored_batch, weighed_batch
from tests.support.ranks import on_ranks
from tests.support.samples import make_train_sample


def test_each_lag_has_the_numbers_of_its_own_tokens():
    rollout, train = [-1.0, -1.0, -2.0, -0.5], [-0.5, -2.0, -2.0, -0.5]
    spans = (Span(version=1, start=0, end=2), Span(version=3, start=2, end=4))
    sample = lagging(make_train_sample([2] * 5, 1, rollout, reward=1.0), spans)
    batch = packed_batch({0: sample}, torch.device("cpu"))
    assert batch.lags.tolist() == [2, 2, 0, 0]
    kept = torch.tensor([True, False, True, True])
    weighed = weighed_batch(scored_batch(batch, torch.tensor(train)), kept)
    tokens = TokenBatch.packed(torch.tensor(train), torch.tensor(rollout), [4])
    (found,) = on_ranks(1, lambda rank: lag_metrics([weighed], tokens, [0, 2], upper=1.5))
    weights = [math.exp(0.5), math.exp(-1.0)]
    ess = sum(weights) ** 2 / (2 * sum(w * w for w in weights))
    k3 = sum(w - 1 - r for w, r in zip(weights, (0.5, -1.0), strict=True)) / 2
    assert found == pytest.approx(
        {
            "lag/mean": 1.0,
            "lag/0/share": 0.5, "lag/0/k3": 0.0, "lag/0/ess": 1.0, "lag/0/clip_share": 0.0,
            "lag/0/rejected_share": 0.0,
            "lag/2/share": 0.5, "lag/2/k3": k3, "lag/2/ess": ess, "lag/2/clip_share": 0.5,
            "lag/2/rejected_share": 0.5,
        }
    )  # fmt: skip
