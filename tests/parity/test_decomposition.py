"""Parity by parts, each exact in float32: trainer == engine prefill == engine decode.

That the trainer does not depend on its batches is tests/onpolicy/models/test_policy.py.
"""

import random

import pytest
import requests
import torch

from tests.support.engines_fixture import CHUNKED_PREFILL_SIZE, make_requests

pytestmark = pytest.mark.engine


def prefill_log_probs(engines, token_ids):
    """Log-probabilities of all tokens after the first, from the engine's own prefill."""
    client = engines.rollout.clients[0]
    answer = requests.post(
        f"{client.url}/generate",
        headers=client.headers,
        json={
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    ).json()
    pairs = answer["meta_info"]["input_token_logprobs"][1:]
    # SGLang may report the vocabulary's last token as 0 here; its value is right.
    for (_, got, _), token in zip(pairs, token_ids[1:], strict=True):
        assert got == token or (got, token) == (0, 136)
    return torch.tensor([log_prob for log_prob, _, _ in pairs])


def trainer_log_probs(engines, sampled, completions, temperature):
    """Of all response tokens, scored in an order and packing of the trainer's own."""
    order = list(range(len(sampled)))
    random.Random(1).shuffle(order)
    scored = engines.trainer.log_probs(
        [sampled[i].prompt_ids + completions[i].response_ids for i in order],
        [len(sampled[i].prompt_ids) for i in order],
        temperature,
    )
    return [scored[order.index(i)] for i in range(len(order))]


def test_the_trainer_equals_the_engines_prefill(engines):
    sequences = [request.prompt_ids for request in make_requests(8, seed=1)]
    sequences = [s for s in sequences if len(s) > 1]
    trained = engines.trainer.log_probs(sequences, [1] * len(sequences), 1.0)
    for sequence, log_probs in zip(sequences, trained, strict=True):
        assert torch.equal(prefill_log_probs(engines, sequence), log_probs)


def test_the_engines_decode_equals_its_own_prefill(engines):
    sampled = make_requests(8, seed=2)
    for request, completion in zip(sampled, engines.generate(sampled), strict=True):
        prefilled = prefill_log_probs(engines, request.prompt_ids + completion.response_ids)
        assert torch.equal(
            prefilled[len(request.prompt_ids) - 1 :], torch.tensor(completion.rollout_log_probs)
        )


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
