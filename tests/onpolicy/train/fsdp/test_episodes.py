"""The loss over episodes that branched is the loss written out by hand in plain torch."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from onpolicy.errors import TrainingError
from tests.onpolicy.train.fsdp.test_trainer import RATES, make
from tests.support.branched import NUM_LEARNT, REWARDS, branched_samples

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
        trajectory, episode = trained.sample.trajectory, trained.episode
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


def test_a_trajectory_that_counts_as_an_episode_weighs_more(make):
    """The other control: three sequences of the episode's, as in a batch that knows no episodes."""
    trainer = make(algorithm={"loss_aggregation": "seq-mean-token-mean"})
    samples = branched_samples(trainer)
    right, _ = learnt(trainer, samples)
    for number, sample in enumerate(samples):
        object.__setattr__(sample, "episode", number)
    trainer = make(algorithm={"loss_aggregation": "seq-mean-token-mean"})
    assert (right, learnt(trainer, samples)[0]) == (
        -2.75 / 64 / 4,
        pytest.approx(-4.75 / 64 / 6),
    )
