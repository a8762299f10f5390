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
    """(directory, hash) of a whole run on two ranks that saves half-way, by its engine."""

    @functools.cache
    def run(backend):
        directory = tmp_path_factory.mktemp(backend)
        output = finish(start(directory, *on(2, backend), *saves(directory)))
        return directory, run_hash(output)

    return run


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_run_goes_on_on_other_ranks_with_the_bits_of_the_undisturbed_run(
    start, undisturbed, tmp_path, backend
):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    directory, expected = undisturbed(backend)
    load = ["--load", str(directory / "save" / SAVED)]
    output = finish(start(tmp_path, *on(1, backend), *saves(tmp_path), *load))
    assert "made with trainer_ranks=2, now 1" in output
    assert run_hash(output) == expected
    assert exported_weights(tmp_path / "save") == exported_weights(directory / "save")
    assert summary(output)["tokens mismatched"] == "0"


def test_a_run_on_two_replicas_of_the_model_has_the_hash_of_one_that_shards_it(
    start, undisturbed, tmp_path
):
    output = finish(start(tmp_path, *on(2), "--fsdp-shard-ranks", "1", *saves(tmp_path)))
    directory, expected = undisturbed("fsdp")
    assert run_hash(output) == expected
    assert exported_weights(tmp_path / "save") == exported_weights(directory / "save")


def test_with_the_engines_own_sums_two_ranks_have_other_bits(start, undisturbed, tmp_path):
    """So the tests above would notice."""
    state = undisturbed("fsdp")[0] / "save" / SAVED / "state.json"
    argv = [*on(2), "--num-rollout", "2"]
    output = finish(start(tmp_path, *argv, in_ranks=OWN_SUMS))
    assert run_hash(output) != json.loads(state.read_text())["run_hash"]
