import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from threading import Barrier

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallback_correction.discrepancy import DiscrepancyConfig, DiscrepancyPenalty, discrepancy
from fallback_correction.tokens import TokenBatch, global_sequence_mean, global_token_mean

HALF, QUARTER = math.log(0.5), math.log(0.25)
EXTREMES = [0.0, -1e-6, -0.1, -1.0, -17.0, -40.0, -103.0]
MODES = {
    "fixed": DiscrepancyConfig(mode="fixed"),
    "lagrangian": DiscrepancyConfig(),
}


def packed(train, rollout, lengths=None, mask=None):
    mask = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    return TokenBatch.packed(
        torch.tensor(train), torch.tensor(rollout), lengths or [len(train)], mask
    )


@st.composite
def sequences(draw):
    """Per sequence: (train, rollout, mask, advantages) of 0 to 6 tokens."""
    log_prob = st.sampled_from(EXTREMES) | st.floats(-5, 0, width=32)
    token = st.tuples(log_prob, log_prob, st.booleans(), st.floats(-3, 3, width=32))
    return draw(st.lists(st.lists(token, max_size=6), min_size=1, max_size=7))


def batch_of(tokens):
    flat = [t for sequence in tokens for t in sequence]
    train, rollout, mask, advantages = ([t[i] for t in flat] for i in range(4))
    batch = packed(train, rollout, [len(s) for s in tokens], mask)
    return batch, torch.tensor(advantages, dtype=torch.float32)


def run(config, parts, gather=None):
    """One training step over the batches; (shaped advantages, step metrics, next lambda)."""
    penalty = DiscrepancyPenalty(config)
    more = {} if gather is None else {"gather": gather}
    shaped = [penalty.apply(*batch_of(part), **more)[0].tolist() for part in parts]
    return [a for part in shaped for a in part], penalty.step(), penalty.lam


def cut(values, lengths):
    values = iter(values)
    return [[next(values) for _ in range(n)] for n in lengths]


# What delta is


def test_the_three_measures_exactly():
    batch = packed([HALF, QUARTER, HALF], [QUARTER, HALF, HALF])
    r = torch.tensor(math.log(2)).item()
    assert discrepancy(batch, "difference").tolist() == [0.25, 0.25, 0.0]
    assert discrepancy(batch, "ratio").tolist() == [1.0, 0.5, 0.0]
    assert discrepancy(batch, "log").tolist() == [r, r, 0.0]


def test_a_log_ratio_of_40_keeps_its_digits():
    up, down = packed([-1.0], [-41.0]), packed([-41.0], [-1.0])
    assert discrepancy(up, "difference").item() == pytest.approx(math.exp(-1), rel=1e-7)
    assert discrepancy(up, "ratio").item() == pytest.approx(math.expm1(40), rel=1e-7)
    assert discrepancy(up, "log").tolist() == discrepancy(down, "log").tolist() == [40.0]
    assert discrepancy(down, "ratio").tolist() == [1.0]


@pytest.mark.parametrize("place", [-1e-3, -1.0, -20.0, -60.0])
def test_the_last_bits_of_the_log_probabilities_count(place):
    a = torch.tensor([place])
    b = torch.nextafter(a, torch.tensor([0.0]))
    r = Fraction(b.item()) - Fraction(a.item())
    batch = TokenBatch.packed(b, a, [1])
    assert discrepancy(batch, "log").item() == float(r)
    assert discrepancy(batch, "ratio").item() == pytest.approx(float(r), rel=1e-5)
    expected = math.exp(place) * float(r)
    assert discrepancy(batch, "difference").item() == pytest.approx(expected, rel=1e-5)


def test_delta_is_the_float32_nearest_to_it_wherever_the_token_stands():
    train = -6 * torch.rand(1000, generator=torch.Generator().manual_seed(0))
    rollout = train + 0.1 * torch.randn(1000, generator=torch.Generator().manual_seed(1))
    pairs = list(zip(train.tolist(), rollout.tolist(), strict=True))
    nearest = {
        "difference": [math.exp(max(a, b)) * -math.expm1(-abs(a - b)) for a, b in pairs],
        "ratio": [abs(math.expm1(a - b)) for a, b in pairs],
        "log": [abs(a - b) for a, b in pairs],
    }
    for measure, values in nearest.items():
        for first in range(9):
            batch = TokenBatch.packed(train[first:], rollout[first:], [1000 - first])
            assert torch.equal(discrepancy(batch, measure), torch.tensor(values[first:]))


@given(sequences())
def test_delta_is_zero_exactly_where_the_log_probabilities_agree(tokens):
    batch, _ = batch_of(tokens)
    same = batch.train_log_probs == batch.rollout_log_probs
    assert torch.equal(discrepancy(batch, "log") == 0, same | ~batch.mask)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_not_finite_is_an_error_only_where_it_counts(bad):
    with pytest.raises(ValueError, match=r"train_log_probs\[1\]"):
        discrepancy(packed([-1.0, bad], [-1.0, -1.0]))
    with pytest.raises(ValueError, match=r"rollout_log_probs\[0\]"):
        discrepancy(packed([-1.0, -1.0], [bad, -1.0]))
    masked = packed([-1.0, bad], [bad, -1.0], mask=[False, False])
    assert discrepancy(masked, "ratio").tolist() == [0.0, 0.0]


def test_a_ratio_beyond_float32_is_an_error():
    with pytest.raises(ValueError, match=r"ratio discrepancy\[0\]=inf"):
        discrepancy(packed([-1.0], [-200.0]), "ratio")


# What becomes of the advantages


def test_the_penalty_is_subtracted_whatever_the_sign_of_the_advantage():
    config = DiscrepancyConfig(lambda_=0.5, average="token")
    batch = packed([HALF, QUARTER, HALF, HALF], [QUARTER, HALF, HALF, QUARTER])
    advantages = torch.tensor([1.0, -1.0, 2.0, 0.0625])
    shaped, metrics = DiscrepancyPenalty(config).apply(batch, advantages)
    assert shaped.tolist() == [0.875, -1.125, 2.0, -0.0625]
    assert shaped.dtype == torch.float32
    assert metrics == {
        "dc/lambda": 0.5, "dc/delta_mean": 0.1875, "dc/delta_max": 0.25,
        "dc/violation": 0.1875 - 0.0037, "dc/penalty_mean": 0.09375, "dc/sign_flip_fraction": 0.25,
    }  # fmt: skip


def test_a_centered_penalty_leaves_the_mean_of_the_advantages():
    """The mean that the budget bounds: of sequences, or of tokens."""
    config = DiscrepancyConfig(lambda_=0.5, centered=True)
    train, rollout, mask = [HALF, HALF, HALF, -1.0], [QUARTER, HALF, HALF, -9.0], [1, 1, 1, 0]
    batch = packed(train, rollout, [1, 3], mask)
    shaped, metrics = DiscrepancyPenalty(config).apply(batch, torch.ones(4))
    assert shaped.tolist() == [1 - 0.125 + 0.0625, 1.0625, 1.0625, 1.0]
    assert metrics["dc/penalty_mean"] == 0.0625
    batch = packed(train, rollout, mask=[1, 0, 1, 0])
    shaped, _ = DiscrepancyPenalty(replace(config, average="token")).apply(batch, torch.ones(4))
    assert shaped.tolist() == [1 - 0.0625, 1.0, 1.0625, 1.0]
    fixed = replace(config, mode="fixed")
    assert DiscrepancyPenalty(fixed).apply(batch, torch.ones(4))[0].tolist() == shaped.tolist()


@given(sequences(), st.sampled_from(sorted(MODES)))
def test_tokens_that_do_not_count_keep_their_advantage(tokens, mode):
    batch, advantages = batch_of(tokens)
    advantages = torch.where(batch.mask, advantages, math.nan)
    shaped, _ = DiscrepancyPenalty(MODES[mode]).apply(batch, advantages)
    assert torch.equal(shaped.isnan(), ~batch.mask)
    assert (shaped[batch.mask] <= advantages[batch.mask]).all()


@given(sequences())
def test_a_lambda_of_zero_changes_no_bit(tokens):
    batch, advantages = batch_of(tokens)
    config = DiscrepancyConfig(lambda_=0.0)
    shaped, _ = DiscrepancyPenalty(config).apply(batch, advantages)
    assert torch.equal(shaped.view(torch.int32), advantages.view(torch.int32))


def test_the_shaped_advantages_carry_no_gradient():
    train = torch.full((2,), -1.0, requires_grad=True)
    batch = TokenBatch(
        train_log_probs=train,
        rollout_log_probs=torch.full((2,), -2.0),
        mask=torch.ones(2, dtype=torch.bool),
        lengths=torch.tensor([2]),
    )
    advantages = torch.ones(2, requires_grad=True)
    shaped, _ = DiscrepancyPenalty(DiscrepancyConfig()).apply(batch, advantages)
    assert not shaped.requires_grad
    assert not discrepancy(batch).requires_grad


def test_advantages_are_one_per_token_finite_and_precise_enough():
    penalty, batch = DiscrepancyPenalty(DiscrepancyConfig()), packed([-1.0, -1.0], [-1.0, -1.0])
    with pytest.raises(ValueError, match="one per token"):
        penalty.apply(batch, torch.ones(1))
    with pytest.raises(ValueError, match="must be float32"):
        penalty.apply(batch, torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"advantages\[1\]=nan"):
        penalty.apply(batch, torch.tensor([1.0, math.nan]))


# How lambda moves


def lambda_after(config, train, rollout, **more):
    penalty = DiscrepancyPenalty(config)
    penalty.apply(packed(train, rollout, **more), torch.ones(len(train)))
    return penalty.step()["dc/violation"], penalty.lam


def test_lambda_moves_by_eta_times_the_violation_after_it_was_applied():
    config = DiscrepancyConfig(lambda_=0.25, eta=0.5, budget=0.125)
    penalty = DiscrepancyPenalty(config)
    batch = packed([HALF], [QUARTER])
    for applied, following in [(0.25, 0.3125), (0.3125, 0.375)]:
        shaped, metrics = penalty.apply(batch, torch.ones(1))
        assert shaped.tolist() == [1 - applied * 0.25]
        assert metrics["dc/lambda"] == applied == penalty.step()["dc/lambda"]
        assert penalty.lam == following


def test_lambda_stops_at_both_bounds():
    config = DiscrepancyConfig(lambda_=0.2, lambda_min=0.15, lambda_max=0.3)
    assert lambda_after(config, [HALF], [QUARTER]) == (0.25 - 0.0037, 0.3)
    assert lambda_after(replace(config, budget=0.1), [HALF], [HALF]) == (-0.1, 0.15)
    exact = replace(config, budget=0.125, lambda_=0.25, lambda_max=0.375)
    assert lambda_after(exact, [HALF], [QUARTER]) == (0.125, 0.375)


def test_a_mean_at_the_budget_leaves_lambda_alone():
    config = DiscrepancyConfig(budget=0.25)
    assert lambda_after(config, [HALF], [QUARTER]) == (0.0, 0.1)


def test_only_the_lagrangian_moves():
    assert lambda_after(MODES["fixed"], [HALF], [QUARTER])[1] == 0.1


def test_a_trajectory_mean_weighs_sequences_and_a_token_mean_tokens():
    train, rollout, lengths = [HALF, HALF, HALF, HALF], [QUARTER, HALF, HALF, HALF], [1, 3]
    config = DiscrepancyConfig(budget=0.0)
    by_sequence, _ = lambda_after(config, train, rollout, lengths=lengths)
    by_token, _ = lambda_after(replace(config, average="token"), train, rollout, lengths=lengths)
    assert (by_sequence, by_token) == (0.125, 0.0625)


@pytest.mark.parametrize("average", ["trajectory", "token"])
def test_a_sequence_that_is_masked_in_full_has_no_part_in_the_mean(average):
    config = DiscrepancyConfig(average=average, budget=0.0)
    mask = [True, False, False]
    more = {"lengths": [1, 2], "mask": mask}
    violation, _ = lambda_after(config, [HALF, -1.0, -9.0], [QUARTER, -9.0, -1.0], **more)
    assert violation == 0.25


@pytest.mark.parametrize("lengths", [[0], [0, 0], [2]])
def test_a_step_without_a_counting_token_leaves_lambda_alone(lengths):
    n = sum(lengths)
    batch = packed([-1.0] * n, [-2.0] * n, lengths, [False] * n)
    penalty = DiscrepancyPenalty(DiscrepancyConfig())
    shaped, metrics = penalty.apply(batch, torch.ones(n))
    assert shaped.tolist() == [1.0] * n
    assert metrics == {**dict.fromkeys(metrics, 0.0), "dc/lambda": 0.1}
    assert penalty.step() == metrics and penalty.lam == 0.1


def test_a_step_that_saw_nothing_is_an_error():
    penalty = DiscrepancyPenalty(DiscrepancyConfig())
    penalty.apply(packed([-1.0], [-1.0]), torch.ones(1))
    penalty.step()
    with pytest.raises(ValueError, match="Call apply before step"):
        penalty.step()


# The same bits however the batch was cut

configs = st.builds(
    DiscrepancyConfig,
    average=st.sampled_from(["trajectory", "token"]),
    measure=st.sampled_from(["difference", "log"]),
)
any_configs = st.builds(
    lambda config, centered: replace(config, centered=centered), configs, st.booleans()
)


@given(sequences(), any_configs, st.randoms())
def test_the_order_of_the_sequences_changes_no_bit(tokens, config, random):
    order = list(range(len(tokens)))
    random.shuffle(order)
    lengths = [len(s) for s in tokens]
    straight, metrics, lam = run(config, [tokens])
    other, other_metrics, other_lam = run(config, [[tokens[i] for i in order]])
    straight = cut(straight, lengths)
    assert [a for i in order for a in straight[i]] == other
    assert (metrics, lam) == (other_metrics, other_lam)


@given(sequences(), configs, st.integers(0, 7), st.integers(0, 7))
def test_micro_batches_change_no_bit(tokens, config, first, second):
    first, second = sorted((first, second))
    parts = [tokens[:first], tokens[first:second], tokens[second:]]
    assert run(config, parts) == run(config, [tokens])


@given(sequences(), any_configs, st.integers(0, 7))
def test_ranks_change_no_bit_and_agree(tokens, config, first):
    whole, metrics, lam = run(config, [tokens])
    ranks = run_on_two_ranks(config, [tokens[:first], tokens[first:]])
    assert ranks[0][0] + ranks[1][0] == whole
    assert [r[1:] for r in ranks] == [(metrics, lam)] * 2


def run_on_two_ranks(config, shares):
    sent, met = [None, None], Barrier(2)

    def of_rank(rank):
        def gather(vector):
            sent[rank] = vector
            met.wait(60)
            together = torch.cat(sent)
            met.wait(60)
            return together

        return run(config, [shares[rank]], gather)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(of_rank, range(2)))


def test_a_sum_that_rounds_differently_in_every_order_does_not():
    deltas = [[(0.0, -float(2**-k), True, 0.0)] for k in range(30)]
    config = DiscrepancyConfig(measure="log", eta=1e-3)
    metrics = run(config, [deltas])[1]
    exact = Fraction(2**30 - 1, 2**29) / 30
    assert metrics["dc/delta_mean"] == pytest.approx(float(exact), rel=1e-15)
    hard = [[(0.0, -x, True, 0.0)] for x in (1e8, 1e-8, 3e-8, 7e7, 1e-9) * 3]
    for parts in ([hard], [hard[::-1]], [[s] for s in hard], [hard[7:], hard[:7]]):
        assert run(config, parts)[1] == run(config, [hard])[1]


@given(sequences(), configs)
def test_padding_changes_no_bit(tokens, config):
    width = max(1, *(len(s) for s in tokens))
    pad = (math.nan, -math.inf, False, 7.0)
    wide = [list(s) + [pad] * (width - len(s)) for s in tokens]
    shaped, metrics, lam = run(config, [wide])
    kept = [row[: len(s)] for row, s in zip(cut(shaped, [width] * len(wide)), tokens, strict=True)]
    assert ([a for row in kept for a in row], metrics, lam) == run(config, [tokens])


@given(sequences())
def test_the_means_are_those_of_the_token_batch(tokens):
    batch, _ = batch_of(tokens)
    delta = discrepancy(batch)
    by_token = run(DiscrepancyConfig(average="token"), [tokens])[1]["dc/delta_mean"]
    by_sequence = run(DiscrepancyConfig(), [tokens])[1]["dc/delta_mean"]
    assert by_token == global_token_mean(batch, delta)
    assert by_sequence == global_sequence_mean(batch, batch.means(delta))


# Checkpoints


@given(st.lists(sequences(), min_size=2, max_size=4), st.integers(1, 3))
def test_a_resumed_run_continues_with_the_same_bits(steps, stop):
    def advance(penalty, some):
        result = []
        for tokens in some:
            shaped, _ = penalty.apply(*batch_of(tokens))
            result.append((shaped.tolist(), penalty.step(), penalty.lam))
        return result

    config = DiscrepancyConfig(measure="log", eta=0.01, budget=0.3)
    straight = advance(DiscrepancyPenalty(config), steps)
    first, second = DiscrepancyPenalty(config), DiscrepancyPenalty(config)
    head = advance(first, steps[:stop])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + advance(second, steps[stop:]) == straight


def test_a_checkpoint_within_a_step_is_an_error():
    penalty = DiscrepancyPenalty(DiscrepancyConfig())
    penalty.apply(packed([-1.0], [-1.0]), torch.ones(1))
    with pytest.raises(ValueError, match="Call step first"):
        penalty.state_dict()


@pytest.mark.parametrize("lam", [-0.1, 1.5, math.nan])
def test_a_lambda_out_of_bounds_is_not_loaded(lam):
    with pytest.raises(ValueError, match="Resume with the bounds"):
        DiscrepancyPenalty(DiscrepancyConfig()).load_state_dict({"lambda": lam})


def test_a_fixed_lambda_is_the_configurations_and_not_the_checkpoints():
    penalty = DiscrepancyPenalty(MODES["fixed"])
    penalty.load_state_dict({"lambda": 0.7})
    assert penalty.lam == 0.1


# The configuration


@pytest.mark.parametrize(
    "values",
    [
        {"eta": math.nan}, {"budget": -1e-9}, {"lambda_max": math.inf}, {"lambda_": 1.1},
        {"lambda_": 0.1, "lambda_min": 0.2},
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_that_means_nothing_is_an_error(values):
    with pytest.raises(ValueError, match=r"=.*: .*\. (Change|Give) "):
        DiscrepancyConfig(**values)


def test_a_fixed_lambda_needs_no_bounds():
    assert DiscrepancyConfig(mode="fixed", lambda_=5.0).lambda_ == 5.0
