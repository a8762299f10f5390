"""Score centering on real servers: what they tell of other tokens, and the runs that learn from it."""

import dataclasses

import numpy as np
import pytest
import torch

from fallback_correction.score_centering import likeliest_kl
from onpolicy.config import groups
from onpolicy.errors import EngineError
from onpolicy.models.policy import PackedTokens
from onpolicy.ops.likeliest_tokens import LikeliestTokens
from onpolicy.rollout.client import _likeliest
from onpolicy.rollout.sample_requests import trajectories_of
from onpolicy.system.number_arrays import Floats, Ints
from tests.e2e.test_filters import FILTERS, VOCABULARY, samples_of, with_filters
from tests.support.engines_fixture import make_engines, make_requests, running
from tests.support.train_runs import finish, metrics_of

pytestmark = pytest.mark.engine

TOLD, LOSS = "train/likeliest_share", "train/centering_loss"
K = 8


def asking(requests, k):
    """The requests, where every other one asks for a token less."""
    ks = [k - number % 2 for number in range(len(requests))]
    pairs = zip(requests, ks, strict=True)
    return [
        dataclasses.replace(r, params=dataclasses.replace(r.params, num_likeliest=n))
        for r, n in pairs
    ]


def answered(pair, k, **filters):
    requests = asking(with_filters(make_requests(6, seed=31, max_new_tokens=10), **filters), k)
    plain = make_requests(3, seed=32, max_new_tokens=10)
    answers = pair.generate([*requests, *plain])
    assert all(not answer.likeliest for answer in answers[6:])
    return trajectories_of(requests, answers[:6])


def compared(pair, trajectories):
    """(log-probabilities that engines returned, the trainer's of the same tokens) of each trajectory."""
    for each in trajectories:
        likeliest = LikeliestTokens.of(each.likeliest)
        packed = PackedTokens.pack(
            [each.token_ids], [each.sampled], [each.temperatures], kept_tokens=[each.kept_tokens]
        )
        with torch.no_grad():
            scores = pair.trainer.policy.module(dataclasses.replace(packed, likeliest=likeliest))
        yield likeliest.log_probs, scores.likeliest_log_probs


@pytest.mark.parametrize("filters", [{}, FILTERS], ids=["whole", "filtered"])
def test_an_aligned_engine_tells_what_the_trainer_computes_of_every_token(engines, filters):
    trajectories = answered(engines, VOCABULARY, **filters)
    for number, (theirs, ours) in enumerate(compared(engines, trajectories)):
        assert theirs.shape == (10, VOCABULARY - number % 2)
        assert torch.equal(theirs, ours)
        assert bool((theirs.exp() == 0).any()) == bool(filters)
    weight = engines.trainer.policy.module.causal_lm.get_output_embeddings().weight
    with torch.no_grad():
        before = weight.clone()
        weight *= 1.001
    assert not any(torch.equal(*each) for each in compared(engines, trajectories))
    with torch.no_grad():
        weight.copy_(before)


@pytest.fixture(scope="module")
def stock(checkpoint, tmp_path_factory):
    algorithm = groups.AlgorithmConfig(policy_loss="centered")
    directory = tmp_path_factory.mktemp("stock")
    pair = make_engines(checkpoint, directory, "bfloat16", aligned=False, algorithm=algorithm)
    with running(pair) as pair:
        yield pair


def learnt(pair, trajectories, k, **fallback):
    learner = pair.trainer.learner
    config = dataclasses.replace(
        learner.config,
        distillation=groups.DistillationConfig(opd_top_k=k),
        fallback=groups.FallbackConfig(**fallback),
    )
    learner.config = learner.corrections.config = config
    learner.corrections.use(config.fallback, centers=True)
    return pair.trainer.train(samples_of(trajectories), 0, [0.0]).metrics


def test_a_stock_engines_likeliest_tokens_center_the_loss(stock):
    requests = make_requests(6, seed=31, max_new_tokens=10)
    found = {}
    for k in (1, K, VOCABULARY):
        asked = [
            dataclasses.replace(r, params=dataclasses.replace(r.params, num_likeliest=k))
            for r in requests
        ]
        trajectories = trajectories_of(asked, stock.generate(asked))
        found[k] = learnt(stock, trajectories, k)
    shares = [metrics[TOLD] for metrics in found.values()]
    assert 0 < shares[0] < shares[1] < 0.9 and shares[2] == pytest.approx(1, abs=1e-4)
    assert all(metrics[LOSS] != 0 and metrics["train/grad_norm"] > 0 for metrics in found.values())
    assert len({metrics["train/grad_norm"] for metrics in found.values()}) == 3


def encoded(values, ids):
    from sglang_patches.generate_each import _base64

    return {"output_top_logprobs": (_base64("<f4", values), _base64("<i4", ids))}


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (encoded([-1, -2, -1, -2], [7, 3, 5, 4]), None),
        # A token that is not among them may be as likely as the last.
        (encoded([-1, -2, -0.5, -1], [7, 3, 6, 4]), None),
        # vllm-project/vllm's mixed requests: another request's k.
        (encoded([-1, -2], [7, 5]), "2 tokens, and 2 log-probabilities of the likeliest"),
        ({}, "2 tokens, and 0 log-probabilities"),
        # PrimeIntellect-ai/prime-rl#1525: told of the next position.
        (encoded([-1, -2, -1, -2], [5, 4, 7, 3]), r"position 0: the sampled token's .* -1.0 does"),
        (encoded([-1, -2, -1.5, -2], [7, 3, 5, 4]), r"position 1: .* -1.0 does not fit .* -1.5 to"),
        (encoded([-1, -2, float("nan"), -2], [7, 3, 6, 4]), "position 1"),
    ],
)  # fmt: skip
def test_likeliest_tokens_that_do_not_fit_the_sampled_ones_are_refused(told, says):
    given = told, 2, Ints([7, 5]), Floats([-1.0, -1.0]), "http://e"
    if says is None:
        found = LikeliestTokens.of(_likeliest(*given))
        assert found.tokens.shape == (2, 2)
        assert np.isfinite(found.log_probs).all()
    else:
        with pytest.raises(EngineError, match=says):
            _likeliest(*given)


@pytest.mark.runs
@pytest.mark.parametrize(
    "flags",
    [
        ("--no-true-on-policy-mode", "--rollout-weight-format", "int4"),
        ("--no-true-on-policy-mode", "--rollout-weight-format", "int4", "--use-tis", "--tis-mode=mask"),
        ("--true-on-policy-mode", "--rollout-lag", "1", "--rollout-top-p", "0.9", "--dtype", "float32"),
    ],
    ids=["stock", "icepop", "lagging and filtered"],
)  # fmt: skip
def test_a_centered_run_learns(start, tmp_path, flags):
    centered = ("--policy-loss", "centered", "--opd-top-k", str(K), "--num-rollout", "2")
    finish(start(tmp_path, *centered, "--global-batch-size", "16", mode=flags))
    *_, last = metrics_of(tmp_path)
    assert 0 < last[TOLD] < 1
    assert last[LOSS] != 0 and last["train/grad_norm"] > 0


def test_the_kl_of_a_stock_engine_is_that_of_its_whole_distributions_and_rejects_by_sequence(stock):
    """Against float64, from the trainer's logits of every token; the engine tells all of them."""
    requests = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, num_likeliest=VOCABULARY))
        for r in make_requests(6, seed=33, max_new_tokens=10)
    ]
    trajectories = trajectories_of(requests, stock.generate(requests))
    largest = []
    for (theirs, ours), each in zip(compared(stock, trajectories), trajectories, strict=True):
        packed = PackedTokens.pack([each.token_ids], [each.sampled], [each.temperatures])
        hidden = dataclasses.replace(packed, wants_hidden=True)
        with torch.no_grad():
            found = stock.trainer.policy.module(hidden).hidden
            logits = stock.trainer.policy.module.head().logits(found).double()
        p = (logits / packed.temperature[:, None].double()).log_softmax(-1)
        q = torch.empty_like(p).scatter_(
            1, LikeliestTokens.of(each.likeliest).tokens, theirs.double()
        )
        wanted = (q.exp() * (q - p)).sum(-1)
        kl = likeliest_kl(ours, theirs)
        assert torch.allclose(kl.double(), wanted, rtol=1e-3, atol=3e-6) and wanted.max() > 1e-5
        largest.append(kl.max().item())
    bound = sorted(largest)[2] * 1.01
    for limit, kept in ((bound, 3), (max(largest) * 1.01, 6)):
        rules = (f"seq_max_kl={limit}",)
        found = learnt(stock, trajectories, VOCABULARY, use_rs=True, rs_rules=rules)
        assert found["correction/rejected_fraction"] == pytest.approx(1 - kept / 6)
