"""Score centering: the mean over what a token could have been, against its definition in float64 and
against a peer's numbers."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallback_correction.config import CorrectionConfig
from fallback_correction.score_centering import centering, coefficients, likeliest_kl

P = [[0.40, 0.25, 0.10], [0.05, 0.60, 0.15], [0.20, 0.30, 0.4999]]
Q = [[0.50, 0.20, 0.15], [0.20, 0.45, 0.05], [0.30, 0.30, 0.30]]
NONE = CorrectionConfig()


def weights(mode="truncate", **bounds):
    return CorrectionConfig(level="token", mode=mode, **bounds)


TIS, CLIP = weights(upper=1.3), weights("clip", lower=0.8, upper=1.3)
ICEPOP = weights("mask", lower=0.5, upper=1.3)

PEER = [
    (NONE, [-0.514783, 0.187401, 1028.631662],
        [[0.26, 0.05, 0.09], [0.125, -0.45, -0.175], [-199.7, -299.7, -499.6]]),
    (TIS, [-0.2075366, 0.1689176, 0.0761989],
        [[0.088, 0.055, 0.022], [0, -0.015, -0.085], [0, 0, -0.1099]]),
    (CLIP, [-0.2535883, -0.012443, 822.7290891],
        [[0.088, 0.055, 0.042], [0.1, -0.135, -0.115], [-159.76, -239.7, -399.53]]),
    (ICEPOP, [-0.9433484, 0.74085, -0.6830794],
        [[0.4, 0.25, 0.1], [-0.05, -0.6, -0.15], [0.2, 0.3, 0]]),
]  # fmt: skip
"""What vime's function makes of P and Q in float64: C, and c of each token."""


@pytest.mark.parametrize(("config", "term", "each"), PEER)
def test_the_term_and_its_coefficients_are_a_peers(config, term, each):
    p, q = torch.tensor(P).log().requires_grad_(), torch.tensor(Q).log()
    found = centering(p, q, config)
    (gradient,) = torch.autograd.grad(found.sum(), p)
    assert found.tolist() == pytest.approx(term, rel=2e-3, abs=1e-6)
    for ours, theirs in zip(gradient.tolist(), each, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-6)


def policies(vocabulary=9, apart=1.0, seed=0):
    """(logits of p, log q), float64 [4, vocabulary]."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(4, vocabulary, generator=generator, dtype=torch.float64)
    noise = torch.randn(4, vocabulary, generator=generator, dtype=torch.float64)
    return (q + apart * noise).requires_grad_(), q.log_softmax(-1)


def weight(ratio, config):
    """In float64, from the definition."""
    if not config.has_weights:
        return torch.ones_like(ratio)
    if config.mode == "mask":
        return ratio * (ratio >= config.lower) * (ratio <= config.upper)
    return ratio.clamp(config.lower if config.mode == "clip" else 0, config.upper)


def mean_score(logits, q, config):
    """The gradient by the logits of E_q[w log p] over the whole vocabulary."""
    p = logits.log_softmax(-1)
    drawn = (q.exp() * weight((p - q).exp(), config)).detach()
    return torch.autograd.grad((drawn * p).sum(), logits)[0]


def centred(logits, q, config, tokens):
    p = logits.log_softmax(-1).gather(1, tokens)
    return torch.autograd.grad(centering(p, q.gather(1, tokens), config).sum(), logits)[0]


@pytest.mark.parametrize("config", [NONE, TIS, CLIP, ICEPOP, weights(upper=math.inf)])
@pytest.mark.parametrize("seed", range(3))
def test_over_the_whole_vocabulary_it_is_the_mean_itself(config, seed):
    logits, q = policies(seed=seed)
    every = torch.arange(9).expand(4, 9)
    found, wanted = centred(logits, q, config, every), mean_score(logits, q, config)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    is_unbounded = config.upper == math.inf
    assert (wanted.abs().max() < 1e-6) == is_unbounded
    if not is_unbounded:
        assert not torch.allclose(-found, wanted, rtol=0, atol=1e-3), "either sign would pass"


@pytest.mark.parametrize("config", [NONE, TIS, CLIP, ICEPOP])
def test_over_the_likeliest_tokens_it_is_the_mean_if_the_rest_is_p_rescaled(config):
    """Where it is not, an error is left."""
    logits, q = policies()
    tokens = q.topk(4).indices
    p = logits.detach().log_softmax(-1)
    is_told = torch.zeros_like(p).scatter(1, tokens, 1).bool()
    rest = [x.exp().masked_fill(is_told, 0) for x in (p, q)]
    rescaled = rest[0] * rest[1].sum(-1, True) / rest[0].sum(-1, True)
    alike = torch.where(is_told, q.exp(), rescaled).log()
    found = centred(logits, alike, config, tokens)
    torch.testing.assert_close(found, mean_score(logits, alike, config), rtol=0, atol=1e-6)
    error = centred(logits, q, config, tokens) - mean_score(logits, q, config)
    assert error.abs().max() > 1e-3


@pytest.mark.parametrize("config", [NONE, TIS, CLIP, ICEPOP])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_equal_engines_have_coefficients_of_0_to_the_bit_and_an_ulp_is_seen(config, k):
    q = policies()[1].float()
    top = q.topk(k).values
    assert not coefficients(top, top.clone(), config).any()
    off = torch.nextafter(top, torch.tensor(-9.0))
    assert coefficients(off, top, NONE).any()


def test_a_token_that_the_engine_cut_off_has_no_part_however_it_is_written():
    """Public report: sgl-project/sglang#5761, where cut tokens come with the smallest float32; others
    write -inf. Our own filters write about -1e30."""
    p, q = torch.tensor([[0.7, 0.3, 0.0]]).log(), torch.tensor([[0.6, 0.4, 0.0]]).log()
    p[0, 2] = -1e30
    for written in (torch.finfo(torch.float32).min, -1e30, -math.inf):
        q[0, 2] = written
        for config in (NONE, TIS, CLIP, ICEPOP, weights(upper=math.inf)):
            found = coefficients(p, q, config)
            assert found.isfinite().all() and found[0, 2] == 0
            assert torch.equal(found[:, :2], coefficients(p[:, :2], q[:, :2], config))
            assert centering(p, q, config).isfinite().all()


def test_a_row_has_the_same_bits_in_any_order_of_its_tokens_and_beside_any_rows():
    logits, q = policies(400)
    p, q = logits.detach().float().log_softmax(-1), q.float()
    whole = centering(p, q, TIS)
    order = torch.randperm(400)
    assert torch.equal(centering(p[:, order], q[:, order], TIS), whole)
    assert torch.equal(centering(p[2:3], q[2:3], TIS), whole[2:3])


@pytest.mark.parametrize(
    ("level", "mode"), [("sequence", "clip"), ("geometric", "mask"), ("token", "taper")]
)
def test_weights_that_are_not_of_one_tokens_ratio_are_refused(level, mode):
    p = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=f"level={level}, mode={mode}: .*Use level token"):
        centering(p, p, CorrectionConfig(level=level, mode=mode))


def told_of(k, seed=0, vocabulary=9):
    """(log p, log q, float32 [4, k], of the tokens likeliest by q; KL(q || p) in float64 [4])."""
    logits, q = policies(vocabulary, seed=seed)
    p = logits.detach().log_softmax(-1)
    log_q, ids = q.topk(k)
    return p.gather(1, ids).float(), log_q.float(), (q.exp() * (q - p)).sum(-1)


@pytest.mark.parametrize("seed", range(5))
def test_over_the_whole_vocabulary_the_kl_is_that_of_the_rollouts_distribution_to_the_trainers(
    seed,
):
    p, q, wanted = told_of(9, seed)
    assert likeliest_kl(p, q).tolist() == pytest.approx(wanted.tolist(), abs=2e-6)
    # Not in the other direction.
    assert likeliest_kl(q, p).tolist() != pytest.approx(wanted.tolist(), abs=1e-2)


@pytest.mark.parametrize("seed", range(5))
def test_over_fewer_tokens_the_kl_is_of_the_partition_and_a_lower_bound_that_grows(seed):
    found = [likeliest_kl(*told_of(k, seed)[:2]).double() for k in range(1, 10)]
    p, q, whole = told_of(3, seed)
    rest, ours = (1 - x.double().exp().sum(-1) for x in (q, p))
    partition = (q.double().exp() * (q - p)).sum(-1) + rest * (rest / ours).log()
    assert found[2].tolist() == pytest.approx(partition.tolist(), abs=2e-6)
    for less, more in itertools.pairwise(found):
        assert (less <= more + 2e-6).all()
    assert (found[0] < whole - 1e-3).any() and (found[-1] <= whole + 2e-6).all()


def test_the_kl_is_0_for_equal_policies_and_infinite_where_only_the_trainer_never_draws_a_token():
    p, q, _ = told_of(9)
    assert torch.equal(likeliest_kl(q, q), torch.zeros(4))
    cut = torch.tensor([[0.75, 0.25, 0.0]]).log()
    assert likeliest_kl(cut, torch.tensor([[0.5, 0.25, 0.25]]).log()).tolist() == [math.inf]
    kept = torch.tensor([[0.5, 0.25, 0.25]]).log()
    wanted = 0.75 * math.log(1.5)
    assert likeliest_kl(kept, cut).tolist() == pytest.approx([wanted], abs=2e-6)
    assert likeliest_kl(p.masked_fill(p == p[0, 0], math.nan), q)[0] == math.inf


@given(st.permutations(range(4)), st.permutations(range(6)))
def test_the_kls_bits_depend_on_no_other_token_and_on_no_order(rows, tokens):
    p, q, _ = told_of(6)
    found = likeliest_kl(p[rows][:, tokens], q[rows][:, tokens])
    assert torch.equal(found, likeliest_kl(p, q)[rows])
    assert torch.equal(found[:1], likeliest_kl(p[rows[:1]], q[rows[:1]]))
