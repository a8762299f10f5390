"""Partial contracts on a real server: every kind is the whole, stock takes the tokens it is given."""

import dataclasses
from functools import partial

import pytest

from onpolicy.contract import KINDS
from onpolicy.errors import ContractError
from onpolicy.explain.attribution import ALIGNED, STOCK, all_but
from onpolicy.run.attribution import Rows
from onpolicy.run.contracts import contract_for
from onpolicy.run.engine_specs import make_rollout_group
from tests.support.engines_fixture import make_engines, make_requests
from tests.support.forked_processes import forked_processes

pytestmark = [pytest.mark.engine, pytest.mark.long]

TEMPERATURE, EVERY = 0.7, "every kind"

HELD_BY_SGLANG = "sglang.srt.models.transformers.replace_rms_norm_class"
"""The hook that keeps Hugging Face's norms in the engine, so that they can be replaced."""


@pytest.fixture(scope="module")
def measured(checkpoint, tmp_path_factory):
    """(rows by name, patches of each row's server, the engines, in the last contract)."""
    directory = tmp_path_factory.mktemp("attribution")
    tokens, patches = directory / "tokens.json", {}
    pair = make_engines(
        checkpoint,
        directory,
        dtype="bfloat16",
        make_rollout=partial(make_rollout_group, tokens=str(tokens)),
    )
    whole, stock = pair.contract, contract_for(pair.config, pair.hf_config, aligned=False)
    contracts = [
        (ALIGNED, whole),
        (STOCK, stock),
        (all_but("norm"), dataclasses.replace(whole, kinds=tuple(k for k in KINDS if k != "norm"))),
        (EVERY, dataclasses.replace(whole, kinds=KINDS)),
    ]
    requests = make_requests(6, seed=6, max_new_tokens=12, temperature=TEMPERATURE)
    try:
        with forked_processes():
            pair.start()
            rows = {}
            for row in Rows(pair, requests, TEMPERATURE, tokens).of(contracts):
                rows[row["name"]] = row
                patches[row["name"]] = pair.rollout.clients[0].report()["patches"]
            yield rows, patches, pair
    finally:
        pair.stop()


@pytest.mark.parametrize("name", [ALIGNED, EVERY])
def test_a_partial_contract_of_every_kind_has_the_bits_of_the_whole_one(measured, name):
    row = measured[0][name]
    assert row["num_mismatched_tokens"] == 0 < row["num_compared_tokens"] == 6 * 12
    assert row["k3_kl_mean"] == row["max_abs_diff"] == 0


def test_every_row_is_of_the_same_tokens(measured):
    """Stock engines draw others, whose log-probabilities would be others too."""
    rows = measured[0]
    assert {row["num_compared_tokens"] for row in rows.values()} == {6 * 12}
    assert rows[STOCK]["max_abs_diff"] < 1  # of the same tokens, in two kernels


def test_what_is_not_aligned_is_sglangs_own(measured):
    patches = measured[1]
    assert {name for name, active in patches.items() if HELD_BY_SGLANG in active} == {
        ALIGNED,
        EVERY,
    }
    # A norm apart, they have the same.
    assert set(patches[EVERY]) - set(patches[all_but("norm")]) == {HELD_BY_SGLANG}
    assert not any("transformers" in target for target in patches[STOCK])


def test_a_side_without_one_of_the_kinds_is_refused(measured):
    _, _, pair = measured
    ours = dataclasses.replace(pair.contract, kinds=tuple(k for k in KINDS if k != "rotary"))
    pair.rollout.contract = ours
    with pytest.raises(ContractError, match=f"the trainer's is {ours.fingerprint}"):
        pair.rollout.connect(pair.trainer.self_check)
