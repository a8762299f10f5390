"""Parity of the trainer and the engine's decoding, exact in float32, and what samples depend on.

That the engine's prefill is the same is tests/e2e/test_prompt_log_probs.py; that the trainer does not
depend on its batches, tests/onpolicy/models/test_policy.py.
"""

import random

import pytest
import torch

from tests.support.engines_fixture import CHUNKED_PREFILL_SIZE, make_requests

pytestmark = pytest.mark.engine


def trainer_log_probs(engines, sampled, completions, temperature):
    """Of all response tokens, scored in an order and packing of the trainer's own."""
    order = list(range(len(sampled)))
    random.Random(1).shuffle(order)
    scored = engines.trainer.log_probs(
        [[*sampled[i].prompt_ids, *completions[i].response_ids] for i in order],
        [len(sampled[i].prompt_ids) for i in order],
        temperature,
    )
    return [scored[order.index(i)] for i in range(len(order))]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_equals_decode_with_chunked_prefill_and_cached_prefixes(engines, temperature):
    sampled = make_requests(24, seed=3, temperature=temperature)
    assert max(len(request.prompt_ids) for request in sampled) > CHUNKED_PREFILL_SIZE
    engines.generate(sampled[:12])  # leaves prefixes in the cache
    completions = engines.generate(sampled)
    assert sum(completion.num_cached_tokens for completion in completions) > 0
    for got, completion in zip(
        trainer_log_probs(engines, sampled, completions, temperature), completions, strict=True
    ):
        assert torch.equal(got, torch.tensor(completion.rollout_log_probs))


def test_samples_depend_on_their_seed_alone(engines):
    """Not on order, batch or cache; and another seed gives another sample."""
    sampled = make_requests(6, seed=4)
    together = engines.generate(sampled)
    backwards = engines.generate(sampled[::-1])[::-1]
    alone = [engines.generate([request])[0] for request in sampled]
    for a, b, c in zip(together, backwards, alone, strict=True):
        assert a.response_ids == b.response_ids == c.response_ids
        assert a.rollout_log_probs == b.rollout_log_probs == c.rollout_log_probs
    prompt = sampled[0].prompt_ids
    variants = [make_requests(4, seed=s)[0] for s in range(4)]
    samples = engines.generate(
        [
            type(v)(prompt_ids=prompt, sampling_seed=v.sampling_seed, params=v.params)
            for v in variants
        ]
    )
    assert len({tuple(sample.response_ids) for sample in samples}) == 4


def test_samples_follow_their_probabilities(engines):
    """The first token of many seeds against the distribution the trainer computes."""
    prompt = make_requests(1, seed=5)[0]
    many = [make_requests(1, seed=s, max_new_tokens=1)[0] for s in range(600)]
    first = [
        completion.response_ids[0]
        for completion in engines.generate(
            [
                type(r)(
                    prompt_ids=prompt.prompt_ids, sampling_seed=r.sampling_seed, params=r.params
                )
                for r in many
            ]
        )
    ]
    sequences = [[*prompt.prompt_ids, token] for token in range(137)]
    scored = engines.trainer.log_probs(sequences, [len(prompt.prompt_ids)] * 137, 1.0)
    probabilities = torch.cat(scored).exp()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-5)
    expected = 600 * probabilities
    observed = torch.bincount(torch.tensor(first), minlength=137)
    likely = expected > 5
    chi2 = ((observed - expected)[likely] ** 2 / expected[likely]).sum().item()
    degrees = int(likely.sum())
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5
