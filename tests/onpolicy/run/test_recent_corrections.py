"""Runs of a real trainer on engines in memory, with the corrections that have no run of their own."""

import pytest

from onpolicy.errors import ConfigError, TrainingError
from onpolicy.training import rollout_correction
from tests.support.policies_in_memory import run_policy
from tests.support.run_in_memory import records_of
from tests.support.tiny_combinations import make_base
from tests.support.unstarted_run import changed

pytestmark = pytest.mark.usefixtures("one_process")

STOCK = {"true_on_policy_mode": False}
LAG = {"rollout_lag": 1, "num_rollout": 3}
TOLD, LOSS = "train/likeliest_share", "train/centering_loss"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


def last_of(base, directory, **flags):
    run_policy(changed(base, **flags, run_dir=str(directory / "run")))
    return records_of(directory)[-1]


@pytest.mark.parametrize(
    "flags",
    [STOCK, {**STOCK, "use_tis": True, "tis_mode": "mask"}, LAG, {**LAG, "rollout_top_p": 0.9}],
    ids=["stock", "icepop", "lag", "lag and top-p"],
)
def test_a_centered_run_learns_of_what_its_engine_tells(base, tmp_path, flags):
    found = last_of(base, tmp_path, policy_loss="centered", opd_top_k=8, **flags)
    assert 0 < found[TOLD] < 1 and found[LOSS] != 0 and found["train/grad_norm"] > 0


def test_a_governor_centers_scores_once_the_engines_are_too_far_apart(base, tmp_path):
    """It starts on the step that the objective is a cure of, and moves down where all is calm."""
    apart = {"governor_k3": 1e-12, "governor_rise_after": 1, "governor_highest": "tis"}
    calm = {"governor_k3": 9.0, "governor_fall_after": 1, "governor_highest": "tis"}
    flags = {"policy_loss": "centered", "opd_top_k": 8, "mismatch_governor": True, **STOCK}
    last_of(base, tmp_path / "apart", num_rollout=3, **flags, **apart)
    last_of(base, tmp_path / "calm", num_rollout=3, **flags, **calm)
    apart_losses, calm_losses = (
        [LOSS in record for record in records_of(tmp_path / name)] for name in ("apart", "calm")
    )
    assert apart_losses == [True, True, True] and calm_losses == [True, False, False]


def test_an_engine_that_tells_the_whole_vocabulary_leaves_no_rest(base, tmp_path):
    found = last_of(base, tmp_path, policy_loss="centered", opd_top_k=137, **STOCK)
    assert found[TOLD] == pytest.approx(1, abs=1e-5)
    with pytest.raises(ConfigError, match=r"--opd-top-k=138: the model knows 137 tokens"):
        last_of(base, tmp_path, policy_loss="centered", opd_top_k=138, **STOCK)


def test_a_sample_that_was_told_another_number_of_tokens_ends_the_run(base, tmp_path, monkeypatch):
    likeliest_tokens = rollout_correction.likeliest_tokens
    monkeypatch.setattr(
        rollout_correction, "likeliest_tokens", lambda batch, k: likeliest_tokens(batch, k + 1)
    )
    with pytest.raises(TrainingError, match="did not return the 9 likeliest tokens"):
        last_of(base, tmp_path, policy_loss="centered", opd_top_k=8, **STOCK)


def test_the_effective_sample_size_of_the_weights_scales_the_rate(base, tmp_path):
    flags = {**LAG, "use_tis": True, "lr": 0.03}
    scaled = last_of(base, tmp_path / "ess", lr_schedule="ess", **flags)
    assert 0 < scaled["train/lr_ess_factor"] < 1
    assert scaled["train/lr"] == 0.03 * scaled["train/lr_ess_factor"]
    assert last_of(base, tmp_path / "plain", **flags)["train/lr"] == 0.03


@pytest.mark.parametrize("steps", [1, 2])
def test_tapered_weights_are_below_1_only_for_negative_advantages(base, tmp_path, steps):
    """In the loss's own pass, and from a pass before it."""
    flags = {
        **LAG,
        "use_tis": True,
        "tis_upper_bound": 1.0,
        "lr": 0.03,
        "global_batch_size": 8 // steps,
    }
    found = {
        mode: last_of(base, tmp_path / mode, tis_mode=mode, **flags)["correction/weight_mean"]
        for mode in ("taper", "truncate")
    }
    assert found["truncate"] < found["taper"] < 1


@pytest.mark.parametrize(
    "flags", [{}, STOCK, {"rollout_top_p": 0.9}], ids=["aligned", "stock", "top-p"]
)
def test_a_run_with_the_optimal_token_baseline_learns(base, tmp_path, flags):
    otb, mean = (
        last_of(base, tmp_path / kind, advantage_estimator=kind, **flags)["train/grad_norm"]
        for kind in ("otb", "dr_grpo")
    )
    assert 0 < otb != mean


def test_kpop_rejects_in_a_run(base, tmp_path):
    flags = {**LAG, "use_rs": True, "lr": 0.03}
    found = last_of(base, tmp_path, rs_rules=("token_binary_kl=1e-4",), **flags)
    assert 0 < found["correction/rejected_high_fraction"] < 1


TRM = {**LAG, "lr": 0.03, "rs_rules": ("seq_max_kl=0.055",), "use_rs": True, "opd_top_k": 137}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"global_batch_size": 4, "tis_batch_normalize": True, "use_tis": True},
        {"use_rollout_logprobs": True, "global_batch_size": 4},
        {"policy_loss": "centered"},
        {"tis_level": "prefix-min", "use_tis": True, "kl_coef": 0.01},
    ],
    ids=["alone", "two steps", "bypass", "centered", "minpro and a penalty"],
)
def test_sequences_are_rejected_by_the_largest_kl_of_distributions(base, tmp_path, flags):
    flags = {**TRM, **flags}
    found = last_of(base, tmp_path / "some", **flags)
    assert 0 < found["correction/rejected_high_fraction"] < 1
    none = last_of(base, tmp_path / "none", **{**flags, "rs_rules": ("seq_max_kl=9",)})
    assert none["correction/rejected_fraction"] == 0
    assert none["train/grad_norm"] != found["train/grad_norm"]
