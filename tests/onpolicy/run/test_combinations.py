"""Every combination of flags that is accepted trains; every other is refused before anything starts."""

import re
from itertools import islice

import pytest
import torch

from onpolicy.errors import ParityError
from onpolicy.token_weights import terms_of
from tests.support.policies_in_memory import PolicyMemory, run_policy
from tests.support.run_in_memory import even_tokens
from tests.support.tiny_combinations import NEEDS_TEXT, combinations_of, make_base
from tests.support.unstarted_run import changed

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("undrawn")]

ROWS = 75
"""In the tests that are always run."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("combinations"))


@pytest.fixture(scope="module")
def combinations(base):
    return combinations_of(base)


@pytest.fixture(scope="module")
def rows(combinations):
    """The first of the array, which have every value and nearly every pair."""
    return [*islice(combinations.rows(), ROWS)]


@pytest.mark.parametrize("number", range(ROWS))
def test_what_is_accepted_trains(base, rows, number, tmp_path):
    if number >= len(rows):
        return  # all pairs are in those before
    config = changed(base, **rows[number], run_dir=str(tmp_path / "run"))
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
        check(changed(base, **row, run_dir=str(tmp_path / str(number))))


def test_an_engine_that_is_a_bit_off_ends_a_run(base, tmp_path, monkeypatch):
    right = PolicyMemory.score

    def wrong(self, context, temperature):
        return torch.nextafter(right(self, context, temperature), torch.tensor(0.0))

    monkeypatch.setattr(PolicyMemory, "score", wrong)
    with pytest.raises(ParityError):
        check(changed(base, run_dir=str(tmp_path)))


def test_every_value_of_every_flag_is_accepted_with_something(combinations):
    uncarried = [item for item in combinations.values if item not in combinations.carriers]
    assert uncarried == NEEDS_TEXT


def test_every_value_is_trained_with(combinations, rows):
    trained = {item for row in rows for item in row.items()}
    assert set(combinations.values) - {*NEEDS_TEXT} <= trained


def test_refusals_say_what_is_wrong_the_rule_and_the_remedy(combinations, rows):
    said = {str(error) for error in combinations.refusals.values()}
    assert len(said) > 20
    assert [text for text in said if not re.fullmatch(r"--[a-z-]+\S*: .+\. .+\.", text)] == []
