"""The loss over episodes of branches and turns is the one by hand; what was given is not learnt."""

import random
from itertools import compress

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from onpolicy.errors import ParityError, TrainingError
from onpolicy.models.policy import PackedTokens
from onpolicy.training.advantages import Estimator
from tests.onpolicy.training.fsdp.test_trainer import RATES, make, make_samples, with_log_prob
from tests.support.branched import NUM_LEARNT, REWARDS, branched_samples
from tests.support.samples import with_trajectory

__all__ = ["make"]

LONGEST = 1024
"""--rollout-max-response-len"""

PER_EPISODE = {
    "token-mean": lambda num_tokens: 1 / sum(NUM_LEARNT),
    "seq-mean-token-mean": lambda num_tokens: 1 / len(REWARDS) / num_tokens,
    "seq-mean-token-sum": lambda num_tokens: 1 / len(REWARDS),
    "seq-mean-token-sum-norm": lambda num_tokens: 1 / len(REWARDS) / LONGEST,
}
"""What a token's loss is multiplied by, by the sampled tokens of its episode."""


def loss_by_hand(model, samples, aggregation):
    """Of a Hugging Face model, one trajectory at a time, with a ratio whose value is 1."""
    total = torch.zeros(())
    for trained in samples:
        trajectory, episode = trained.trajectory, trained.episode
        ids = torch.tensor([trajectory.token_ids])
        log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        for log_prob, is_sampled in zip(log_probs, trajectory.sampled[1:], strict=True):
            if is_sampled:
                ratio = (log_prob - log_prob.detach()).exp()
                factor = PER_EPISODE[aggregation](NUM_LEARNT[episode])
                total = total - ratio * REWARDS[episode] * factor
    return total


def learnt(trainer, samples):
    """(loss, gradients by name) of an optimizer step."""
    module, gradients = trainer.policy.module, {}
    take_step = trainer.policy.take_step

    def keep(rate):
        for name, p in module.named_parameters():
            gradient = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            name = name.removeprefix("causal_lm.").replace("_checkpoint_wrapped_module.", "")
            gradients[name] = gradient.clone()
        take_step(rate)

    trainer.policy.take_step = keep
    return trainer.train(samples, 0, RATES).metrics["train/loss"], gradients


@pytest.mark.parametrize("aggregation", PER_EPISODE)
@pytest.mark.parametrize("max_tokens", [100, 1])
def test_the_loss_and_its_gradients_are_those_by_hand(make, checkpoint, aggregation, max_tokens):
    """In one micro-batch, and in one for each trajectory. 1e-7 are some roundings of the largest."""
    trainer = make(
        algorithm={"loss_aggregation": aggregation},
        trainer={"max_tokens_per_gpu": max_tokens, "clip_grad": 0.0},
        rollout={"rollout_max_response_len": LONGEST},
    )
    samples = branched_samples(trainer)
    assert [len(s.lags) for s in samples] == [4, 3, 1, *NUM_LEARNT[1:]]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = loss_by_hand(model, samples, aggregation)
    expected.backward()
    loss, gradients = learnt(trainer, samples)
    assert loss == expected.item()
    by_hand = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert 1e-5 < max(gradient.abs().max() for gradient in gradients.values()) < 5e-2
    assert len(gradients) == len(by_hand)
    for name, gradient in by_hand.items():
        difference = (gradients[name] - gradient).abs().max()
        assert difference <= 1e-7, (name, difference, gradient.abs().max())


def test_a_branch_that_would_be_trained_twice_is_refused(make):
    trainer = make()
    samples = branched_samples(trainer, twice=True)
    assert [len(s.lags) for s in samples[:3]] == [4, 5, 6]
    told = r"prompt 0, sample 0: 2 sampled .* at position 3, would be learnt in an earlier one too"
    with pytest.raises(TrainingError, match=told):
        learnt(trainer, samples)


def in_turns(sample, rng):
    """The sample as if some of its response had been given."""
    trajectory = sample.trajectory
    start = len(trajectory.prompt_ids)
    kept = [True, *(rng.random() < 0.6 for _ in trajectory.rollout_log_probs[1:])]
    return with_trajectory(
        sample,
        sampled=[*trajectory.sampled[:start], *kept],
        rollout_log_probs=[*compress(trajectory.rollout_log_probs, kept)],
        temperatures=[*compress(trajectory.temperatures, kept)],
    )


def samples_in_turns(trainer):
    rng = random.Random(1)
    return [in_turns(sample, rng) for sample in make_samples(trainer)]


def test_one_bit_after_a_given_token_is_found_at_its_place(make):
    trainer = make()
    samples = samples_in_turns(trainer)
    last = len(samples[3].lags) - 1
    assert False in samples[3].trajectory.sampled[samples[3].trajectory.sampled.index(True) :]
    value = torch.tensor(samples[3].rollout_log_probs[last])
    off = torch.nextafter(value, torch.tensor(0.0)).item()
    samples[3] = with_log_prob(samples[3], last, off)
    with pytest.raises(ParityError, match=rf"1 of \d+ tokens.*response position={last}"):
        trainer.train(samples, 0, RATES)


def test_the_loss_is_that_of_the_sampled_tokens_each_with_its_own_advantage(make):
    """With ratios of 1: minus their mean advantage, with the gradient of their log-probabilities."""

    class OfItsOwn(Estimator):
        def advantages(self, outcomes, ours):
            return {number: given[number] for number in ours}

    trainer = make()
    samples = samples_in_turns(trainer)
    generator = torch.Generator().manual_seed(0)
    given = [torch.rand(len(s.lags), generator=generator) * 2 - 1 for s in samples]
    advantages = torch.cat(given)
    trajectories = [s.trajectory for s in samples]
    packed = PackedTokens.pack(
        [t.token_ids for t in trajectories],
        [t.sampled for t in trajectories],
        [t.temperatures for t in trajectories],
    )
    log_probs, *_ = trainer.policy.module(packed)
    (-(advantages * log_probs).mean()).backward()
    gradients = [
        p.grad.to_local() for p in trainer.policy.module.parameters() if p.grad is not None
    ]
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item()
    trainer.policy.module.zero_grad()
    trainer = make(fallback={}, algorithm={"loss_aggregation": "token-mean"})
    trainer.learner.estimator = OfItsOwn()
    metrics = trainer.train(samples, 0, RATES).metrics
    assert metrics["train/loss"] == pytest.approx(-advantages.mean().item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
