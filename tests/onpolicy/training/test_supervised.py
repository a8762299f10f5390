"""The loss of given answers is the mean cross-entropy of their tokens, over the whole global batch."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from onpolicy.training.supervised import supervised_batches, supervised_loss, supervised_step
from tests.support.branched import branched_samples
from tests.support.megatron_training import Job, equal, make, weights


@pytest.fixture
def trainer(checkpoint):
    return make(
        Job(path=checkpoint, backend="fsdp", changes={"trainer": {"max_tokens_per_gpu": 12}})
    )


def test_it_is_transformers_cross_entropy(trainer, checkpoint):
    samples = branched_samples(trainer)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    losses = []
    for each in (s.trajectory for s in samples):
        tokens, learnt = torch.tensor([each.token_ids]), torch.tensor(each.sampled)
        logits = model(tokens).logits[0, :-1]
        losses.append(F.cross_entropy(logits, tokens[0, 1:], reduction="none")[learnt[1:]])
    mean = torch.cat(losses).mean().item()
    assert len(supervised_batches(trainer, samples)) > 1
    assert supervised_loss(trainer, samples) == pytest.approx(mean, rel=1e-5)
    assert supervised_step(trainer, samples, 0.0)["train/loss"] == pytest.approx(mean, rel=1e-5)


def test_tokens_that_were_given_are_read_and_not_learnt(trainer):
    """What the log-probabilities of a rollout are does not matter, and which tokens are learnt does."""
    samples = branched_samples(trainer)
    loss = supervised_loss(trainer, samples)
    trajectory = samples[0].trajectory
    trajectory.rollout_log_probs.array[0] = -7.0
    assert supervised_loss(trainer, samples) == loss
    samples[0].trajectory = trajectory.as_given(trajectory.sampled.index(True) + 1)
    assert supervised_loss(trainer, samples) != loss


def test_a_step_at_rate_0_changes_nothing_and_another_does(trainer):
    samples = branched_samples(trainer)
    before = {name: x.clone() for name, x in weights(trainer).items()}
    supervised_step(trainer, samples, 0.0)
    assert equal(weights(trainer), before)
    loss = supervised_step(trainer, samples, 1e-2)["train/loss"]
    assert not equal(weights(trainer), before)
    assert supervised_loss(trainer, samples) < loss
