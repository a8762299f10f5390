"""The optimal token baseline against a peer's numbers and against its definition."""

import math

import pytest
import torch

from onpolicy.algorithm.token_baseline import score_norms, token_baseline_advantages

REWARDS = [[0.0, 0.0, 1.0], [0.0, 0.0], [0.5, 0.0, 0.0]]
PROBABILITIES = [[0.5, 0.9, 0.2], [0.3, 0.6], [0.8, 0.1, 0.4]]
SQUARES = [[0.4, 0.82, 0.3], [0.25, 0.5], [0.66, 0.2, 0.35]]
PEER = [
    [0.6126126, 0.8271605, 0.5494881],
    [-0.3873874, -0.1728395],
    [0.1126126, -0.1728395, -0.4505119],
]
"""What verl's compute_optimal_token_baseline_advantage makes of these in float64."""


def returns_of(rewards):
    return [math.fsum(rewards[place:]) for place in range(len(rewards))]


def advantages(rewards=REWARDS, squares=SQUARES):
    pairs = zip(PROBABILITIES, squares, strict=True)
    norms = [score_norms([math.log(p) for p in each], square) for each, square in pairs]
    return token_baseline_advantages([returns_of(each) for each in rewards], norms)


def test_advantages_are_a_peers_also_where_responses_differ_in_length():
    for found, wanted in zip(advantages(), PEER, strict=True):
        assert found == pytest.approx(wanted, abs=1e-6)
    wrong = [[x + 0.1 for x in row] for row in SQUARES]
    assert advantages(squares=wrong)[0] != pytest.approx(PEER[0], abs=1e-3)


def test_a_norm_is_that_of_the_scores_gradient_by_the_logits():
    """|e_a - pi|^2, added from the first token on."""
    logits = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pi, tokens = logits.softmax(-1), torch.tensor([0, 3, 3, 8, 1])
    log_probs = pi.log().gather(1, tokens[:, None])[:, 0]
    found = score_norms(log_probs.tolist(), pi.square().sum(-1).tolist())
    score = torch.nn.functional.one_hot(tokens, 9) - pi
    assert found == pytest.approx(score.square().sum(-1).cumsum(0).tolist())


def test_it_leaves_less_variance_of_the_gradient_than_the_mean_where_norms_differ():
    """Of A_t times the norm of the score, summed over responses: the baseline is its minimum."""
    returns, norms = [[1.0], [0.0], [0.0]], [[0.1], [2.0], [0.5]]
    found = token_baseline_advantages(returns, norms)
    b = returns[0][0] - found[0][0]
    assert b == pytest.approx(0.1 / 2.6)

    def moment(baseline):
        return sum((g[0] - baseline) ** 2 * w[0] for g, w in zip(returns, norms, strict=True))

    assert all(moment(b) < moment(b + step) for step in (-0.01, 0.01)) and moment(b) < moment(1 / 3)


@pytest.mark.parametrize("reward", [0.1, 1.0, -0.7])
def test_equal_returns_teach_exactly_nothing_and_a_single_response_has_no_baseline(reward):
    equal = [[0.0, 0.0, reward], [0.0, reward], [0.0, 0.0, reward]]
    assert advantages(equal) == [[0.0] * 3, [0.0] * 2, [0.0] * 3]
    assert token_baseline_advantages([[reward]], [[0.3]]) == [[reward]]
    assert token_baseline_advantages([[1.0], [0.0]], [[0.0], [0.0]]) == [[1.0], [0.0]]
