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


@pytest.mark.parametrize(("backend", "flags"), [("fsdp", CARRIES), ("megatron", ())])
def test_a_run_goes_on_on_other_ranks_with_the_bits_of_the_undisturbed_run(
    start, undisturbed, tmp_path, backend, flags
):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    directory, expected = undisturbed(2, backend, *flags)
    load = ["--load", str(directory / "save" / SAVED)]
    output = finish(start(tmp_path, *on(1, backend), *flags, *saves(tmp_path), *load))
    assert "made with trainer_ranks=2, now 1" in output
    assert run_hash(output) == expected
    assert exported_weights(tmp_path / "save") == exported_weights(directory / "save")
    assert summary(output)["tokens mismatched"] == "0"


def test_a_greedy_answer_and_coefficients_that_move_are_those_of_one_rank(undisturbed):
    """Both are the learner's, whatever engine it has."""
    (directory, expected), (_, found) = (
        undisturbed(1, "fsdp", *CARRIES),
        undisturbed(2, "fsdp", *CARRIES),
    )
    assert found == expected
    moved = metrics_of(directory)
    for name in ("train/entropy_coef", "train/kl_coef"):
        assert len({metrics[name] for metrics in moved}) == len(moved) == 4
    assert all("rollout/greedy_reward" in metrics for metrics in moved)


def test_with_the_engines_own_sums_two_ranks_have_other_bits(start, undisturbed, tmp_path):
    """So the tests above would notice."""
    state = undisturbed(1, "fsdp", *CARRIES)[0] / "save" / SAVED / "state.json"
    argv = [*on(2), *CARRIES, "--num-rollout", "2"]
    output = finish(start(tmp_path, *argv, in_ranks=OWN_SUMS))
    assert run_hash(output) != json.loads(state.read_text())["run_hash"]


@pytest.mark.parametrize("forgotten", ["penalties", "bonus"])
def test_a_run_that_forgets_a_coefficient_that_it_had_come_to_has_other_bits(
    start, undisturbed, tmp_path, forgotten
):
    """So the first test would notice."""
    directory, expected = undisturbed(1, "fsdp", *CARRIES)
    load = ["--load", str(directory / "save" / SAVED)]
    output = finish(start(tmp_path, *on(1), *CARRIES, *load, in_ranks=FORGETS % forgotten))
    assert run_hash(output) != expected
