"""A run that goes on on another number of ranks has the bits of the undisturbed run."""

import functools
import json

import pytest

from tests.support.train_runs import exported_weights, finish, run_hash, summary

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.runs]

SAVED = "step_000002"
SUMS_SHOW = ("--max-tokens-per-gpu", "60", "--dtype", "float32")
"""Several micro-batches on each rank, and weights whose last bits are in the hash."""

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
    """(directory, hash) of a whole run that saves half-way, by its ranks and its training engine."""

    @functools.cache
    def run(ranks, backend):
        directory = tmp_path_factory.mktemp(f"{backend}{ranks}")
        output = finish(start(directory, *on(ranks, backend), *saves(directory)))
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
