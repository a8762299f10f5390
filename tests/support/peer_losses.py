"""The micro-batch that peers' functions were given, whose answers tests/data/peer_losses.json has."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from onpolicy.algorithm.aggregation import token_shares
from tests.support.onpolicy_batches import make_micro_batches, scored_batch, weighed_batch
from tests.support.samples import make_train_sample

PEERS = json.loads((Path(__file__).parents[1] / "data/peer_losses.json").read_text())
INPUTS = PEERS["inputs"]


def packed(rows):
    return torch.tensor([x for row in rows for x in row])


def case_of(name):
    """What a peer was recorded as, by its name."""
    (case,) = (case for case in PEERS["objectives"] if case["name"] == name)
    return case


def peer_batch(aggregation="token-mean", **more):
    """(log_probs with gradient, micro-batch) of the recorded inputs."""
    sequences = zip(INPUTS["lengths"], INPUTS["advantages"], strict=True)
    samples = [
        make_train_sample(range(1 + n), 1, [0.0] * n, a, i) for i, (n, a) in enumerate(sequences)
    ]
    (batch,) = make_micro_batches(samples, max_tokens=99)
    old, log_probs = packed(INPUTS["old"]), packed(INPUTS["log_probs"])
    weighed = weighed_batch(scored_batch(batch, old), torch.ones(len(old), dtype=torch.bool))
    shares = token_shares(batch.tokens(old), aggregation, scale_length=max(INPUTS["lengths"]))
    return log_probs.requires_grad_(), replace(weighed, shares=shares, **more)
