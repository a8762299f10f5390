"""The policies that a discrepancy penalty asks for at one state (arXiv 2606.08779, appendix B).

max over the simplex of sum_a pi_a A_a - lambda D(pi, mu), eq. 12, with A the advantages, mu the
rollout's policy and D the sum over actions of w d^2, where d is

    difference  pi - mu         pi = mu + (A - nu) / (2 lambda w)                  eq. 13, 16
    ratio       pi / mu - 1     pi = mu + mu^2 (A - nu) / (2 lambda w)             eq. 14, 17
    log         log(pi / mu)    pi = mu exp(-W(-mu (A - nu) / (2 lambda w)))       eq. 15, 18

W is the principal branch of Lambert's function; nu makes pi sum to 1. The text of the paper does not
say which w it means, so there are two readings: `unweighted`, w = 1, and `weighted`, w = mu, which
makes D an expectation under the rollout's policy. Everything here is float64 [K]; K: actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import lambertw

from fallback_correction.ranges import require_choice

Vector = NDArray[np.float64]
Measure = Literal["difference", "ratio", "log"]
Reading = Literal["unweighted", "weighted"]

_MAX_HALVINGS = 200

# W is real from -1/e on, but scipy gives nan at the float64 nearest to it: the next one up.
_BRANCH_POINT = np.nextafter(-np.exp(-1), 0)


def solve(
    advantages: Vector,
    mu: Vector,
    lam: float,
    measure: Measure = "difference",
    reading: Reading = "unweighted",
) -> Vector:
    """The optimal policy of eq. 12: [K].

    For `log`, the best policy with pi <= e mu, where the objective is concave. It is a local
    maximum on the simplex; with a small lambda, one far beyond e mu at some action may be better.
    ValueError if there is none, because lambda is too small for the advantages.
    """
    advantages, mu = _checked(advantages, mu, measure, reading)
    if not 0 < lam < np.inf:
        raise ValueError(f"lam={lam}: must be above 0 and finite. Without a penalty, take argmax.")
    policy = _policy(advantages, mu, lam, measure, reading)
    if policy is None:
        raise ValueError(
            f"lam={lam}: the log penalty is too weak here. Every policy that eq. 18 gives on the "
            "principal Lambert-W branch (pi <= e mu) sums to less than 1, so it has no interior "
            "optimum. Raise lam, or use the measure 'difference' or 'ratio'."
        )
    return policy


def solve_budgeted(
    advantages: Vector,
    mu: Vector,
    budget: float,
    measure: Measure = "difference",
    reading: Reading = "unweighted",
    spent: Callable[[Vector], float] | None = None,
) -> tuple[Vector, float]:
    """The optimal policy that spends exactly `budget`, and its lambda (eq. 20): ([K], float).

    Without `spent` a policy spends D of its measure. ValueError if no lambda spends as much.
    """
    advantages, mu = _checked(advantages, mu, measure, reading)
    if not 0 < budget < np.inf:
        raise ValueError(f"budget={budget}: must be above 0 and finite. With 0 the optimum is mu.")

    def cost(policy: Vector) -> float:
        return spent(policy) if spent else penalty(policy, mu, measure, reading)

    def overspends(lam: float) -> bool:
        policy = _policy(advantages, mu, lam, measure, reading)
        return policy is None or cost(policy) > budget

    scale = float(np.ptp(advantages)) or 1.0
    low, high = scale * 2.0**-_MAX_HALVINGS, scale * 2.0**_MAX_HALVINGS
    lam = _last_true(overspends, low, high) if overspends(low) else low
    policy = solve(advantages, mu, lam, measure, reading)
    if not np.isclose(cost(policy), budget, rtol=1e-6, atol=0):
        raise ValueError(
            f"budget={budget}: the {measure} penalty's interior optima spend "
            f"{cost(policy):.6g} at most, so it is never active. Lower it."
        )
    return policy, lam


def penalty(policy: Vector, mu: Vector, measure: Measure, reading: Reading) -> float:
    """D(policy, mu). Infinite for a policy that leaves mu's support, except by `difference`."""
    require_choice("measure", measure, Measure)
    require_choice("reading", reading, Reading)
    if measure == "difference":
        return float(np.sum(_weights(mu, reading) * (policy - mu) ** 2))
    inside = mu > 0
    if (policy[~inside] > 0).any():
        return np.inf
    ratio = policy[inside] / mu[inside]
    with np.errstate(divide="ignore"):
        distance = ratio - 1 if measure == "ratio" else np.log(ratio)
    return float(np.sum(_weights(mu[inside], reading) * distance**2))


def _weights(mu: Vector, reading: Reading) -> Vector:
    return mu if reading == "weighted" else np.ones_like(mu)


def _policy(
    advantages: Vector, mu: Vector, lam: float, measure: Measure, reading: Reading
) -> Vector | None:
    """Bisection on nu; None if no nu on the principal branch makes the policy sum to 1."""
    policy = np.zeros_like(mu)
    # An action outside the support stays there unless its cost is finite, as in `difference` alone.
    kept = (mu > 0) | (measure == "difference")
    mu, weight = mu[kept], _weights(mu[kept], reading)
    # With the best action at 0, nu keeps its relative precision when a small lambda drives it there.
    gain = advantages[kept] - advantages[kept].max()
    slope = (1.0 if measure == "difference" else mu**2 if measure == "ratio" else mu) / weight
    slope = slope / (2 * lam)

    def at(nu: float) -> Vector:
        step = slope * (gain - nu)
        if measure == "log":
            policy: Vector = mu * np.exp(-lambertw(np.maximum(-step, _BRANCH_POINT)).real)
        else:
            # The KKT projection onto the simplex: the multiplier of an action at 0 is -(mu + step).
            policy = np.maximum(mu + step, 0)
        return policy

    low = gain.min()
    if measure == "log":
        low = max(low, float(np.max(gain + _BRANCH_POINT / slope)))
        if at(low).sum() < 1 - 1e-12:
            return None
    solution = at(_last_true(lambda nu: bool(at(nu).sum() > 1), low, 0.0))
    policy[kept] = solution / solution.sum()
    return policy


def _last_true(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Returns where a condition that holds at the low end first fails, to the last bit."""
    while True:
        middle = _middle(low, high)
        if middle in (low, high):
            return high
        low, high = (middle, high) if holds(middle) else (low, middle)


def _middle(low: float, high: float) -> float:
    """Geometric between positive numbers, where the arithmetic one would need as many halvings."""
    if low > 0 and high / low > 4:
        return float(np.sqrt(low) * np.sqrt(high))
    return low + (high - low) / 2


def _checked(
    advantages: Vector, mu: Vector, measure: Measure, reading: Reading
) -> tuple[Vector, Vector]:
    advantages, mu = np.asarray(advantages, np.float64), np.asarray(mu, np.float64)
    if mu.ndim != 1 or advantages.shape != mu.shape or not len(mu):
        raise ValueError(
            f"advantages={advantages.shape}, mu={mu.shape}: both must be [K] with K of 1 or more. "
            "Give one number per action."
        )
    require_choice("measure", measure, Measure)
    require_choice("reading", reading, Reading)
    if not np.isfinite(advantages).all():
        raise ValueError(f"advantages={advantages}: must be finite. Leave those actions out.")
    if not ((mu >= 0).all() and abs(mu.sum() - 1) < 1e-9):
        raise ValueError(f"mu={mu}: must be probabilities that sum to 1. Divide by their sum.")
    if measure == "difference" and reading == "weighted" and (mu == 0).any():
        raise ValueError(
            f"mu[{int(np.argmin(mu))}]=0.0: the weighted difference costs nothing there. Leave the "
            "action out, or read D unweighted."
        )
    return advantages, mu
