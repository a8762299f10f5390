"""Top-k, top-p and min-p on a real server, trained by the real trainer: the same bits, and controls."""

import dataclasses
from itertools import cycle

import pytest
import torch

from onpolicy.errors import ParityError
from onpolicy.ops import kept_tokens
from onpolicy.ops.kept_tokens import Cut, packed, unpacked
from onpolicy.rollout.sample_requests import trajectories_of
from onpolicy.types import Prompt, Sample
from tests.support.engines_fixture import make_engines, make_requests, running

FILTERS = {"top_k": 60, "top_p": 0.8, "min_p": 0.02}
VOCABULARY = 137


def with_filters(requests, **filters):
    """The requests, sampled at several temperatures."""
    pairs = zip(requests, cycle((1.0, 0.7, 1.3)), strict=False)
    return [
        dataclasses.replace(r, params=dataclasses.replace(r.params, temperature=t, **filters))
        for r, t in pairs
    ]


@pytest.fixture(scope="module")
def requests():
    return with_filters(make_requests(12, seed=21, max_new_tokens=20), **FILTERS)


@pytest.fixture(scope="module")
def trajectories(engines, requests):
    """Beside requests without filters, which must not be changed by them."""
    plain = make_requests(6, seed=22, max_new_tokens=20)
    answers = engines.generate([*requests, *plain])
    for answer, alone in zip(answers[12:], engines.generate(plain), strict=True):
        assert answer.response_ids == alone.response_ids
        assert answer.rollout_log_probs == alone.rollout_log_probs
        assert answer.kept_tokens == alone.kept_tokens == []
    return trajectories_of(requests, answers[:12])


@pytest.fixture(autouse=True)
def _cut(engines, monkeypatch):
    """As --rollout-top-k, -p and --rollout-min-p of a run set it."""
    monkeypatch.setattr(engines.trainer.learner, "cut", Cut.of(*FILTERS.values()))


def samples_of(trajectories, **more):
    prompt = Prompt(index=0, prompt_ids=[5], label="", text="")
    return [
        Sample(
            prompt=prompt,
            sample_index=i,
            trajectory=t,
            reward=(-1.0) ** i,
            group=0,
            episode=i,
            **more,
        )
        for i, t in enumerate(trajectories)
    ]


def train(engines, trajectories, rates=(0.0,), **more):
    return engines.trainer.train(samples_of(trajectories, **more), 0, list(rates)).metrics


def test_tokens_are_drawn_from_what_is_kept_and_come_with_it(trajectories):
    sizes = set()
    for trajectory in trajectories:
        kept = unpacked(trajectory.kept_tokens, VOCABULARY)
        assert kept.gather(1, torch.tensor(trajectory.response_ids)[:, None]).all()
        sizes |= set(kept.sum(-1).tolist())
    assert min(sizes) < 20 < max(sizes) <= 60


def test_no_token_differs(engines, trajectories):
    metrics = train(engines, trajectories)
    assert metrics["parity/num_mismatched_tokens"] == 0
    assert metrics["parity/num_compared_tokens"] == 12 * 20


def test_in_float16_no_token_differs_and_a_product_in_bfloat16_is_found(
    checkpoint, tmp_path, requests, monkeypatch
):
    """float16 cannot hold the logit of a token that was cut off."""
    with running(make_engines(checkpoint, tmp_path, "float16")) as engines:
        trajectories = trajectories_of(requests, engines.generate(requests))
        monkeypatch.setattr(engines.trainer.learner, "cut", Cut.of(*FILTERS.values()))
        engines.trainer.policy.loss_scale.value = 2.0**10
        metrics = train(engines, trajectories)
        assert metrics["parity/num_mismatched_tokens"] == metrics["train/skipped_share"] == 0
        assert metrics["parity/num_compared_tokens"] == 12 * 20 and metrics["train/grad_norm"] > 0
        operators = engines.trainer.operators
        linear = operators.linear
        monkeypatch.setattr(operators, "linear", lambda *given: linear(*given).bfloat16().half())
        with pytest.raises(ParityError, match="tokens have another log-probability in training"):
            train(engines, trajectories)


def test_one_token_more_in_a_set_is_found(engines, trajectories):
    """The least likely, whose probability need not change the last bit of the others'."""
    kept = unpacked(trajectories[3].kept_tokens, VOCABULARY)
    kept[-1, int(kept[-1].logical_not().nonzero()[0])] = True
    changed = dataclasses.replace(
        trajectories[3], kept_tokens=[*trajectories[3].kept_tokens[:-1], *packed(kept[-1:])]
    )
    with pytest.raises(ParityError, match=r"^1 of .*sample 3.*position=19.*own cut keeps other"):
        train(engines, [*trajectories[:3], changed, *trajectories[4:]])


def test_without_the_sets_every_token_differs_that_was_drawn_from_fewer(engines, trajectories):
    """What a trainer would compute that leaves the renormalisation out."""
    bare = [dataclasses.replace(t, kept_tokens=[]) for t in trajectories]
    with pytest.raises(ParityError, match=r"^(\d+) of \1 tokens"):
        train(engines, bare)


def test_a_cut_in_another_order_is_found(engines, trajectories, monkeypatch):
    def top_p_first(operators, log_probs, top_k, top_p, min_p):
        all_of_them, no_limit = torch.full_like(top_k, kept_tokens.ALL), torch.ones_like(top_p)
        by_mass = kept(operators, log_probs, all_of_them, top_p, min_p)
        return by_mass & kept(operators, log_probs, top_k, no_limit, min_p)

    kept = kept_tokens._kept
    monkeypatch.setattr(kept_tokens, "_kept", top_p_first)
    with pytest.raises(ParityError, match="tokens have another log-probability in training"):
        train(engines, trajectories)


def test_the_probe_compares_the_cut_too(engines, requests, monkeypatch):
    own = [r for r in requests if r.params.temperature == 1.0]
    answers = engines.generate(own)
    scores = engines.score(own, answers, 1.0)
    for answer, got in zip(answers, scores, strict=True):
        assert got.tolist() == answer.rollout_log_probs
    monkeypatch.setattr(engines.trainer.learner, "cut", Cut.of(-1, 0.8, 0.02))
    assert any(x.isnan().any() for x in engines.score(own, answers, 1.0))


def test_sets_are_replayed_once_the_policy_has_changed(engines, trajectories):
    """Large steps: many tokens are outside today's cut, and no ratio becomes infinite."""
    policy = engines.trainer.policy.module
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    metrics = train(engines, trajectories, rates=(3e-2, 3e-2, 3e-2))
    assert metrics["parity/num_mismatched_tokens"] == 0
    assert all(torch.tensor(x).isfinite() for x in metrics.values())
    metrics = train(engines, trajectories, policy_version=1)
    assert metrics["parity/num_compared_tokens"] == 0
    assert all(torch.tensor(x).isfinite() for x in metrics.values())
    with torch.no_grad():
        for name, p in policy.named_parameters():
            p.copy_(before[name])
