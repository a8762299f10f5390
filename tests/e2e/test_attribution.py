"""Partial contracts on a real server: every kind, or layer, is the whole; stock takes given tokens."""

import dataclasses
from functools import partial

import pytest

from onpolicy.contract import KINDS, OUTSIDE
from onpolicy.errors import ContractError
from onpolicy.explain.attribution import GIVEN_TOKENS, measure, parts_of, together
from onpolicy.explain.effects import ALIGNED, STOCK, all_but
from onpolicy.explain.microscope import TAPS, Microscope
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import make_rollout_group
from tests.support.engines_fixture import make_engines, make_requests
from tests.support.forked_processes import forked_processes

pytestmark = [pytest.mark.engine, pytest.mark.runs]

TEMPERATURE, EVERY = 0.7, "every kind"
EVERY_LAYER, ALL_BUT_LAYER_1, ALL_BUT_OUTSIDE = "every layer", all_but("layer 1"), all_but(OUTSIDE)

HELD_BY_SGLANG = "sglang.srt.models.transformers.replace_rms_norm_class"
"""The hook that keeps Hugging Face's norms in the engine, so that they can be replaced."""


@pytest.fixture(scope="module")
def measured(checkpoint, tmp_path_factory):
    """(rows by name, patches of each row's server, the engines in the last contract, what the microscope
    sees under it)."""
    directory, taps = tmp_path_factory.mktemp("attribution"), tmp_path_factory.mktemp("taps")
    tokens, patches = directory / "tokens.json", {}
    pair = make_engines(
        checkpoint,
        directory,
        dtype="bfloat16",
        make_rollout=partial(
            make_rollout_group, extensions={GIVEN_TOKENS: str(tokens), TAPS: str(taps)}
        ),
    )
    whole, stock = pair.contract, contract_for(pair.config, pair.hf_config, aligned=False)
    kinds = parts_of(whole, "kinds", 2)
    first, second, outside = (alone for _, alone, _ in parts_of(whole, "layers", 2))
    contracts = [
        (ALIGNED, whole),
        (STOCK, stock),
        (all_but("norm"), together([alone for name, alone, _ in kinds if name != "norm"])),
        (EVERY, together([alone for _, alone, _ in kinds])),
        (EVERY_LAYER, together([first, second, outside])),
        (ALL_BUT_OUTSIDE, together([first, second])),
        (ALL_BUT_LAYER_1, together([first, outside])),
    ]
    requests = make_requests(6, seed=6, max_new_tokens=12, temperature=TEMPERATURE)
    try:
        with forked_processes():
            pair.start()
            rows = {}
            for row in measure(pair, requests, TEMPERATURE, tokens, contracts):
                rows[row["name"]] = row
                patches[row["name"]] = pair.rollout.clients[0].report()["patches"]
            yield rows, patches, pair, Microscope(pair, taps, requests, TEMPERATURE).look()
    finally:
        pair.stop()


@pytest.mark.parametrize("name", [ALIGNED, EVERY, EVERY_LAYER])
def test_a_partial_contract_of_every_kind_or_layer_has_the_bits_of_the_whole_one(measured, name):
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
    kinds = (ALIGNED, STOCK, all_but("norm"), EVERY)
    assert [name for name in kinds if HELD_BY_SGLANG in patches[name]] == [ALIGNED, EVERY]
    # A norm apart, they have the same.
    assert set(patches[EVERY]) - set(patches[all_but("norm")]) == {HELD_BY_SGLANG}
    assert not any("models.transformers" in target for target in patches[STOCK])


@pytest.mark.parametrize("name", [ALL_BUT_LAYER_1, ALL_BUT_OUTSIDE])
def test_what_is_stock_in_one_layer_makes_tokens_differ(measured, name):
    """In bfloat16, where SGLang's norm of transformers' code rounds twice and PyTorch's once."""
    assert measured[0][name]["num_mismatched_tokens"] > 0 < measured[0][name]["k3_kl_mean"]


def test_all_but_one_layer_is_aligned_and_that_layer_is_sglangs_own(measured):
    result = measured[3]
    sites = {(site["site"][0], site["site"][1]): site for site in result["sites"]}
    before = [site for (module, _), site in sites.items() if module.startswith("layers.0.")]
    assert len(before) == 14  # seven linears, four norms, rotary embedding, attention, gate
    assert all(s["inputs_differ"] == s["outputs_differ"] == 0 < s["rows"] for s in before)
    assert result["source"]["site"][0].startswith("layers.1.")
    own = {site.partition(" of ")[::2] for site in result["only_in_one"]}
    assert {module.split(".")[1] for _, module in own} == {"1"}
    assert {operator for operator, _ in own} == {"linear", "rms_norm", "attention"}
    # After it operators compute what they are given, as everywhere.
    assert sites["norm", "rms_norm"]["own"] == sites["lm_head", "linear"]["own"] == 0


def test_a_side_without_one_of_the_kinds_is_refused(measured):
    pair = measured[2]
    ours = dataclasses.replace(pair.contract, kinds=tuple(k for k in KINDS if k != "rotary"))
    pair.rollout.contract = ours
    with pytest.raises(ContractError, match=f"the trainer's is {ours.fingerprint}"):
        pair.rollout.connect(pair.trainer.self_check)
