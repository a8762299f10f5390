import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.algorithm.objectives import kl_estimate

KINDS = ["k1", "k2", "k3", "low_var_kl"]


def estimate(x, kind, **options):
    """Value and gradient where log reference - log policy is x."""
    log_probs = torch.tensor([0.0], requires_grad=True)
    value = kl_estimate(log_probs, torch.tensor([x]), kind, **options)
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    return value.item(), gradient.item()


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        ("low_var_kl", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
    ],
)
def test_estimators_and_their_gradients_exactly(kind, value, gradient):
    assert estimate(-0.5, kind) == (pytest.approx(value), pytest.approx(gradient))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_have_a_kl_of_exactly_zero(kind):
    log_probs = torch.tensor([-0.1, -30.0, 0.0])
    assert not kl_estimate(log_probs, log_probs, kind).any()


@given(st.floats(-40, 40, width=32))
def test_only_k1_is_ever_negative(x):
    assert all(estimate(x, kind)[0] >= 0 for kind in KINDS[1:])


@pytest.mark.parametrize(
    ("x", "value", "gradient"),
    [
        (2.0, math.exp(2) - 3, 1 - math.exp(2)),
        (2.7, 10.0, 0.0),  # k3 is 11.2
        (19.9, 10.0, 0.0),  # the gradient of k3 is -4.4e8
        (-10.5, math.exp(-10.5) + 9.5, 1 - math.exp(-10.5)),
        (-11.5, 10.0, 0.0),
        (-math.inf, 10.0, 0.0),
        (math.inf, 10.0, 0.0),
    ],
)
def test_low_var_kl_is_k3_up_to_10_nats(x, value, gradient):
    assert estimate(x, "low_var_kl") == (pytest.approx(value), pytest.approx(gradient))


@pytest.mark.parametrize("x", [40.0, -40.0])
def test_k3_is_cut_and_has_no_gradient_beyond_the_clamp(x):
    value, gradient = estimate(x, "k3")
    assert (value, gradient) == (estimate(math.copysign(20.0, x), "k3")[0], 0.0)
    assert math.isfinite(value)


@pytest.mark.parametrize("x", [20.0, -20.0])
def test_k3_keeps_its_gradient_at_the_clamp(x):
    assert estimate(x, "k3")[1] == pytest.approx(-math.expm1(x))


@pytest.mark.parametrize("x", [40.0, -40.0])
def test_the_clamp_of_k3_is_an_option_and_the_others_have_none(x):
    value, gradient = estimate(x, "k3", log_ratio_clamp=None)
    assert (value, gradient) == (pytest.approx(math.expm1(x) - x), pytest.approx(-math.expm1(x)))
    assert estimate(x, "k1") == (-x, 1.0)
    assert estimate(x, "k2") == (800.0, -x)
    assert estimate(100.0, "k3", log_ratio_clamp=None)[0] == math.inf


def random_policies(seed):
    """Logits of the policy, and log-probabilities of the sampler and of the reference."""
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values[0].requires_grad_(), values[1].log_softmax(-1), values[2].log_softmax(-1)


@given(st.integers(0, 2**32 - 1))
def test_without_the_ratio_the_gradients_on_policy_are_zero_the_kls_and_the_reverse_kls(seed):
    logits, _, ref = random_policies(seed)
    log_probs = logits.log_softmax(-1)
    kl = (log_probs.exp() * (log_probs - ref)).sum()
    reverse = (ref.exp() * (ref - log_probs)).sum()
    for kind, objective in {"k1": 0 * kl, "k2": kl, "k3": reverse}.items():
        expectation = (log_probs.detach().exp() * kl_estimate(log_probs, ref, kind)).sum()
        (got,) = torch.autograd.grad(expectation, logits, retain_graph=True)
        (exact,) = torch.autograd.grad(objective, logits, retain_graph=True)
        assert got.tolist() == pytest.approx(exact.tolist(), rel=1e-12, abs=1e-14)
