"""A run that goes on on another number of ranks has the bits of the undisturbed run."""

import functools
import json

import pytest

from tests.support.train_runs import exported_weights, finish, metrics_of, run_hash, summary

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.runs]

SAVED = "step_000002"
SUMS_SHOW = ("--max-tokens-per-gpu", "60", "--dtype", "float32")
"""Several micro-batches on each rank, and weights whose last bits are in the hash."""

CARRIES = (
    "--advantage-estimator", "remax",
    "--entropy-ctrl", "adaptive", "--entropy-target", "9", "--entropy-coef-delta", "0.01",
    "--kl-coef", "0.1", "--kl-ctrl", "adaptive", "--kl-target", "0.001", "--kl-horizon", "32",
)  # fmt: skip
"""Samples are compared with a greedy answer, and two coefficients move after every rollout."""

FORGETS = """
from onpolicy.train.learner import Learner
everything = Learner.load_state_dict
Learner.load_state_dict = lambda self, state: everything(self, {**state, %r: {}})
"""

OWN_SUMS = """
from dataclasses import replace
from onpolicy.config import TrainConfig
plan = TrainConfig.plan.func
TrainConfig.plan = property(lambda config: replace(plan(config), is_rank_invariant=False))
"""


def on(ranks, backend="fsdp"):
    ranks = ["--actor-num-ranks-per-node", str(ranks), "--cpu-threads", "1"]
    return [*ranks, "--train-backend", backend, *SUMS_SHOW]


def saves(directory):
    return ["--save", str(directory / "save"), "--save-interval", "2"]


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    """(directory, hash) of a whole run that saves half-way, by its ranks, engine and further flags."""

    @functools.cache
    def run(ranks, backend, *flags):
        directory = tmp_path_factory.mktemp(f"{backend}{ranks}")
        output = finish(start(directory, *on(ranks, backend), *flags, *saves(directory)))
        return directory, run_hash(output)

    return run


@pytest.mark.parametrize(
    ("backend", "before", "after"), [("fsdp", 2, 1), ("fsdp", 1, 2), ("megatron", 2, 1)]
)
def test_a_run_goes_on_on_other_ranks_with_the_bits_of_the_undisturbed_run(
    start, undisturbed, tmp_path, backend, before, after
):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    directory, expected = undisturbed(before, backend)
    load = ["--load", str(directory / "save" / SAVED)]
    output = finish(start(tmp_path, *on(after, backend), *saves(tmp_path), *load))
    assert f"made with trainer_ranks={before}, now {after}" in output
    assert run_hash(output) == expected
    assert exported_weights(tmp_path / "save") == exported_weights(directory / "save")
    assert summary(output)["tokens mismatched"] == "0"


def test_with_the_engines_own_sums_two_ranks_have_other_bits(start, undisturbed, tmp_path):
    """So the tests above would notice."""
    state = undisturbed(1, "fsdp")[0] / "save" / SAVED / "state.json"
    output = finish(start(tmp_path, *on(2), "--num-rollout", "2", in_ranks=OWN_SUMS))
    assert run_hash(output) != json.loads(state.read_text())["run_hash"]


def test_a_greedy_answer_and_coefficients_that_move_are_those_of_one_rank(
    start, undisturbed, tmp_path
):
    """Both are the learner's, whatever engine it has."""
    directory, expected = undisturbed(1, "fsdp", *CARRIES)
    assert expected != undisturbed(1, "fsdp")[1]
    moved = metrics_of(directory)
    for name in ("train/entropy_coef", "train/kl_coef"):
        assert len({metrics[name] for metrics in moved}) == len(moved) == 4
    assert all("rollout/greedy_reward" in metrics for metrics in moved)
    output = finish(start(tmp_path, *on(2), *CARRIES))
    assert run_hash(output) == expected
    assert summary(output)["tokens mismatched"] == "0"


@pytest.mark.parametrize("forgotten", ["", "penalties", "bonus"])
def test_a_run_goes_on_with_the_coefficients_that_it_had_come_to(
    start, undisturbed, tmp_path, forgotten
):
    """And with other bits where one of the two is forgotten."""
    directory, expected = undisturbed(1, "fsdp", *CARRIES)
    load = ["--load", str(directory / "save" / SAVED)]
    forgets = FORGETS % forgotten if forgotten else ""
    output = finish(start(tmp_path, *on(1), *CARRIES, *load, in_ranks=forgets))
    assert (run_hash(output) == expected) == (not forgotten)
