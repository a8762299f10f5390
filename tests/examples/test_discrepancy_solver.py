import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from examples.discrepancy_toy.solver import penalty, solve, solve_budgeted

MEASURES = ["difference", "ratio", "log"]
READINGS = ["unweighted", "weighted"]
KINDS = [(measure, reading) for measure in MEASURES for reading in READINGS]


@st.composite
def states(draw, max_actions=6):
    """(advantages, mu with every probability above 0, lambda)."""
    weights = draw(st.lists(st.floats(0.01, 1), min_size=1, max_size=max_actions))
    advantage = st.floats(-3, 3)
    advantages = draw(st.lists(advantage, min_size=len(weights), max_size=len(weights)))
    return np.array(advantages), np.array(weights) / sum(weights), draw(st.floats(0.05, 20))


def solve_or_skip(*arguments):
    try:
        return solve(*arguments)
    except ValueError as error:
        assert "principal Lambert-W branch" in str(error)
        assume(False)


def numeric(advantages, mu, lam, measure, reading):
    """What SLSQP finds, from mu, on the simplex; for `log` where the objective is concave."""
    top = np.minimum(math.e * mu, 1) if measure == "log" else np.ones_like(mu)
    return minimize(
        lambda p: lam * penalty(p, mu, measure, reading) - p @ advantages,
        mu,
        method="SLSQP",
        bounds=[(1e-12 * m, h) for m, h in zip(mu, top, strict=True)],
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    ).x


@pytest.mark.parametrize("kind", KINDS)
@given(states())
def test_the_closed_forms_are_what_a_numeric_optimiser_finds(kind, state):
    advantages, mu, lam = state
    policy = solve_or_skip(advantages, mu, lam, *kind)

    def value(p):
        return p @ advantages - lam * penalty(p, mu, *kind)

    found = numeric(advantages, mu, lam, *kind)
    assert value(policy) >= value(found) - 1e-8
    assert np.abs(policy - found).max() < 2e-4  # SLSQP's own precision at a flat maximum


@pytest.mark.parametrize("kind", KINDS)
@given(states(max_actions=40))
def test_a_policy_is_on_the_simplex_and_the_stationary_condition_holds_with_one_nu(kind, state):
    advantages, mu, lam = state
    measure, reading = kind
    policy = solve_or_skip(advantages, mu, lam, *kind)
    assert (policy >= 0).all() and abs(policy.sum() - 1) < 1e-12
    weight = mu if reading == "weighted" else 1.0
    slope = {
        "difference": 2 * weight * (policy - mu),
        "ratio": 2 * weight * (policy - mu) / mu**2,
        "log": 2 * weight * np.log(np.maximum(policy, 1e-300) / mu) / np.maximum(policy, 1e-300),
    }[measure]
    nu = advantages - lam * slope
    inside = policy > 0
    scale = 1e-6 * (1 + np.abs(nu).max())
    assert np.ptp(nu[inside]) < scale
    assert (nu[~inside] <= nu[inside].min() + scale).all()


def test_three_known_policies():
    advantages, mu = np.array([1.0, -1.0]), np.array([0.5, 0.5])
    assert solve(advantages, mu, 2.0, "difference") == pytest.approx([0.75, 0.25])
    assert solve(advantages, mu, 1.0, "difference", "weighted") == pytest.approx([1.0, 0.0])
    assert solve(advantages, mu, 1.0, "ratio") == pytest.approx([0.625, 0.375])
    assert solve(advantages, mu, 1.0, "ratio", "weighted") == pytest.approx([0.75, 0.25])


def test_only_the_difference_reaches_an_action_that_the_rollout_never_takes():
    advantages, mu = np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.5, 0.0])
    assert solve(advantages, mu, 1.0, "difference")[2] == pytest.approx(1 / 3)
    for kind in KINDS[2:]:
        assert solve(advantages, mu, 1.0, *kind) == pytest.approx([0.5, 0.5, 0.0])
    with pytest.raises(ValueError, match=r"mu\[2\]=0.0: the weighted difference costs nothing"):
        solve(advantages, mu, 1.0, "difference", "weighted")


@pytest.mark.parametrize("reading", READINGS)
def test_a_log_penalty_that_is_too_weak_has_no_interior_optimum(reading):
    with pytest.raises(ValueError, match=r"no interior optimum\. Raise lam"):
        solve(np.array([1.0, -1.0, -1.0]), np.array([0.1, 0.5, 0.4]), 1e-3, "log", reading)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(states(), st.floats(1e-4, 0.05))
def test_a_budget_is_spent_to_the_last_and_optimally(kind, state, budget):
    advantages, mu, _ = state
    assume(np.ptp(advantages) > 0.1 and len(mu) > 1)
    try:
        policy, lam = solve_budgeted(advantages, mu, budget, *kind)
    except ValueError as error:
        assert "never active" in str(error)
        assume(False)
    assert penalty(policy, mu, *kind) == pytest.approx(budget, rel=1e-6)
    assert policy == pytest.approx(solve(advantages, mu, lam, *kind), abs=1e-12)
    less, _ = solve_budgeted(advantages, mu, budget / 2, *kind)
    assert policy @ advantages > less @ advantages > mu @ advantages


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_that_no_optimum_spends_is_an_error(kind):
    mu = np.array([0.1, 0.5, 0.4])
    for advantages, budget in [([1.0, -1.0, -1.0], 1000.0), ([1.0, 1.0, 1.0], 1e-6)]:
        with pytest.raises(ValueError, match=r"is never active\. Lower it"):
            solve_budgeted(np.array(advantages), mu, budget, *kind)


@pytest.mark.parametrize("reading", READINGS)
def test_the_penalty_of_a_policy_that_leaves_the_support(reading):
    mu, inside, outside = np.array([1.0, 0.0]), np.array([1.0, 0.0]), np.array([0.5, 0.5])
    assert [penalty(inside, mu, measure, reading) for measure in MEASURES] == [0, 0, 0]
    assert penalty(outside, mu, "ratio", reading) == penalty(outside, mu, "log", reading) == np.inf
    assert penalty(outside, mu, "difference", "unweighted") == 0.5
    assert penalty(mu, np.array([0.5, 0.5]), "log", reading) == np.inf


@pytest.mark.parametrize(
    ("advantages", "mu", "lam", "match"),
    [
        ([1.0], [0.5, 0.5], 1.0, "must be"),
        ([], [], 1.0, "K of 1 or more"),
        ([1.0, math.nan], [0.5, 0.5], 1.0, "must be finite"),
        ([1.0, 1.0], [0.5, 0.4], 1.0, "sum to 1"),
        ([1.0, 1.0], [1.5, -0.5], 1.0, "sum to 1"),
        ([1.0, 1.0], [math.nan, 0.5], 1.0, "sum to 1"),
        ([1.0, 1.0], [0.5, 0.5], 0.0, "above 0"),
        ([1.0, 1.0], [0.5, 0.5], math.nan, "above 0"),
    ],
)
def test_inputs_that_mean_nothing_are_errors(advantages, mu, lam, match):
    with pytest.raises(ValueError, match=match):
        solve(np.array(advantages), np.array(mu), lam)
