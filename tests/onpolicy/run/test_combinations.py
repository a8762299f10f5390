"""Every combination of flags that is accepted trains; every other is refused before anything starts."""

import re
from itertools import islice

import pytest
import torch

from onpolicy.errors import ParityError
from onpolicy.ops.row_digests import row_digests
from onpolicy.token_weights import terms_of
from tests.support import engines_in_memory
from tests.support.policies_in_memory import PolicyMemory, run_policy
from tests.support.run_in_memory import even_tokens, records_of
from tests.support.tiny_combinations import combinations_of, make_base
from tests.support.unstarted_run import changed

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_process")]

ROWS = 40
"""In `make test`: every value and 97 of 100 pairs are in these. `make test-runs` takes all others."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("combinations"))


@pytest.fixture(scope="module")
def combinations(base):
    return combinations_of(base)


@pytest.fixture(scope="module")
def rows(combinations):
    """The first of the array."""
    return [*islice(combinations.rows(), ROWS)]


@pytest.mark.parametrize("number", range(ROWS))
def test_what_is_accepted_trains(base, rows, number, tmp_path):
    if number >= len(rows):
        return  # all pairs are in those before
    check_row(number, changed(base, **rows[number], run_dir=str(tmp_path / "run")))


def check_row(number, config):
    """Every other row weighs tokens."""
    check(config, weighing(config) if number % 2 else even_tokens)


def weighing(config):
    """A reward that weighs the tokens of every other sample in each term that the loss has."""

    def reward(sample):
        if sample.sample_index % 2:
            count = sample.trajectory.num_sampled
            for place, term in enumerate(terms_of(config)):
                sample.token_weights[term] = [(place + i) % 3 / 2 for i in range(count)]
        return even_tokens(sample)

    return reward


def check(config, reward=even_tokens):
    """Train two steps."""
    if not config.plan.starts_aligned and config.plan.on_stock_mismatch == "fail":
        with pytest.raises(ParityError):  # the engine of these tests differs from a stock trainer
            run_policy(config, reward)
        return
    summary, weights = run_policy(config, reward)
    assert summary.rollouts == 2
    assert all(weight.isfinite().all() for weight in weights.values())
    if config.plan.starts_aligned:
        assert summary.totals.num_compared_tokens > 0
        assert summary.totals.num_mismatched_tokens == 0


@pytest.mark.runs
def test_so_does_what_is_left(base, combinations, tmp_path):
    for number, row in enumerate(islice(combinations.rows(), ROWS, None)):
        check_row(number, changed(base, **row, run_dir=str(tmp_path / str(number))))


def test_an_engine_that_is_a_bit_off_ends_a_run(base, tmp_path, monkeypatch):
    right = PolicyMemory.score

    def wrong(self, context, temperature):
        return torch.nextafter(right(self, context, temperature), torch.tensor(0.0))

    monkeypatch.setattr(PolicyMemory, "score", wrong)
    with pytest.raises(ParityError):
        check(changed(base, run_dir=str(tmp_path)))


def test_a_mismatch_leads_to_the_correction_for_its_rollout_if_the_policy_is_to_fall_back(
    base, tmp_path, monkeypatch, caplog
):
    right = PolicyMemory.score

    def wrong_in_one_rollout(self, context, temperature):
        found = right(self, context, temperature)
        return torch.nextafter(found, torch.tensor(0.0)) if self.version == 1 else found

    monkeypatch.setattr(PolicyMemory, "score", wrong_in_one_rollout)
    falls_back = {"parity_policy": "fallback", "use_tis": True, "num_rollout": 3}
    run_policy(changed(base, **falls_back, run_dir=str(tmp_path / "run")))
    before, fallen, after = records_of(tmp_path)
    assert "Going on with the fallback correction" in caplog.text
    assert fallen["parity/num_fallbacks"] == 1
    assert fallen["parity/num_mismatched_tokens"] > 0
    assert fallen["correction/weight_mean"] == pytest.approx(1, abs=1e-5)
    for record in (before, after):
        assert record["parity/num_mismatched_tokens"] == 0
        assert "correction/weight_mean" not in record


@pytest.mark.parametrize("lag", [0, 1])
def test_an_engine_whose_rows_are_a_bit_off_ends_a_run_that_compares_them(
    base, tmp_path, monkeypatch, lag
):
    """In the loss's pass, or in the probe before samples are too old for that."""

    def wrong(rows):
        return row_digests(torch.nextafter(rows, torch.tensor(0.0)))

    monkeypatch.setattr(engines_in_memory, "row_digests", wrong)
    config = changed(base, rollout_lag=lag, run_dir=str(tmp_path))
    check(config)
    with pytest.raises(ParityError, match=r"the digests of .* differ|13 have another digest"):
        check(changed(config, parity_check="full"))


def test_every_value_of_every_flag_is_accepted_with_something(combinations):
    uncarried = [item for item in combinations.values if item not in combinations.carriers]
    assert uncarried == []


def test_every_value_is_trained_with(combinations, rows):
    trained = {item for row in rows for item in row.items()}
    assert set(combinations.values) <= trained


def test_refusals_say_what_is_wrong_the_rule_and_the_remedy(combinations, rows):
    said = {str(error) for error in combinations.refusals.values()}
    assert len(said) > 20
    assert [text for text in said if not re.fullmatch(r"--[a-z-]+\S*: .+\. .+\.", text)] == []
