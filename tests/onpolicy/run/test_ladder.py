"""The governor's rungs as contracts, corrections and learning rates."""

import dataclasses

import pytest

from fallback_correction.config import DiscrepancyConfig, GovernorConfig
from onpolicy.config import TrainConfig, groups
from onpolicy.contract import NumericsContract, OperatorShapes
from onpolicy.errors import ConfigError
from onpolicy.run.ladder import Ladder, first_rung
from onpolicy.training.rollout_correction import Corrections, with_stale_samples

SHAPES = OperatorShapes(linear=(), attention=(), norm=(), vocab_size=1)
ALIGNED = NumericsContract(backend="cpu", device="cpu", dtype="float32", shapes=SHAPES)
STOCK = dataclasses.replace(ALIGNED, backend="stock")
BAD = {"parity/num_compared_tokens": 9, "train/k3_kl": 1.0}


def config_of(governed=True, aligned=False, lag=0, **fallback):
    return TrainConfig(
        rollout=groups.RolloutConfig(rollout_lag=lag),
        parity=groups.ParityConfig(true_on_policy_mode=aligned),
        fallback=groups.FallbackConfig(**fallback),
        governor=groups.GovernorFlags(
            mismatch_governor=governed, limits=GovernorConfig(rise_after=1)
        ),
    )


def make(**values):
    return Ladder(config_of(**values), STOCK, ALIGNED)


def standing(ladder):
    flags = ladder.fallback
    return ladder.contract.backend, flags.use_tis, flags.use_rs, ladder.lr_scale


EVERYTHING = {
    "use_tis": True, "use_rs": True, "rs_veto_threshold": 1e-4, "dc": DiscrepancyConfig(mode="fixed"),
    "custom_tis_function_path": "a.b", "rs_rules": ("seq_mean_k3=0.01",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("rung", "corrections", "lr_scale"),
    [
        ("stock", (False, False, None, "", ""), 1.0),
        ("tis", (True, False, None, "fixed", "a.b"), 1.0),
        ("mis", (True, True, 1e-4, "fixed", "a.b"), 1.0),
        ("decay", (True, True, 1e-4, "fixed", "a.b"), 0.5),
        ("aligned", (True, True, 1e-4, "fixed", "a.b"), 1.0),
    ],
)
def test_what_each_rung_has_of_a_run_that_asks_for_everything(rung, corrections, lr_scale):
    """On the aligned one they are at hand, for a rollout that is none."""
    ladder = make(**EVERYTHING)
    ladder.load_state_dict({"rung": rung, "bad": 0, "calm": 0, "falls": 0})
    flags = ladder.fallback
    assert (
        flags.use_tis, flags.use_rs, flags.rs_veto_threshold, flags.dc.mode,
        flags.custom_tis_function_path,
    ) == corrections  # fmt: skip
    assert ladder.lr_scale == lr_scale
    assert flags.get_mismatch_metrics
    assert flags.rs_rules == ("seq_mean_k3=0.01",)


@pytest.mark.parametrize("weighs", [False, True])
def test_score_centering_is_a_cure_that_the_lowest_rung_lacks_alone_or_with_weights(weighs):
    centered = {"algorithm": groups.AlgorithmConfig(policy_loss="centered")}
    ladder = Ladder(dataclasses.replace(config_of(), **centered), STOCK, ALIGNED)
    assert first_rung(ladder.config) == "tis" and not ladder.fallback.use_tis
    fallback = groups.FallbackConfig(use_tis=weighs)
    ladder = Ladder(dataclasses.replace(ladder.config, fallback=fallback), STOCK, ALIGNED)
    corrections = Corrections(ladder.config)
    for rung in ("stock", "tis", "mis"):
        ladder.load_state_dict({"rung": rung, "bad": 0, "calm": 0, "falls": 0})
        corrections.use(ladder.fallback, ladder.centers)
        assert corrections.flags.use_tis == (weighs and rung != "stock")
        assert (corrections.num_centered > 0) == (rung != "stock")


def test_on_the_lowest_rung_nothing_is_corrected_and_lambda_waits():
    flags = {k: v for k, v in EVERYTHING.items() if k != "custom_tis_function_path"}
    ladder = make(**flags)
    corrections = Corrections(ladder.config)
    assert corrections.weights and corrections.penalty
    corrections.penalty.lam = 0.7
    ladder.load_state_dict({"rung": "stock", "bad": 0, "calm": 0, "falls": 0})
    corrections.use(ladder.fallback, ladder.centers)
    assert corrections.weights is corrections.penalty is corrections.custom is None
    assert corrections.state_dict() == {"penalty": {"lambda": 0.7}}
    ladder.update(BAD)
    corrections.use(ladder.fallback, ladder.centers)
    assert corrections.weights.rules == () and corrections.weights.veto is None
    assert corrections.penalty.lam == 0.7


def test_every_rung_adds_to_the_one_below_up_to_aligned_operators():
    ladder = make()
    seen = [standing(ladder)]
    while ladder.update(BAD) is not None:
        seen.append(standing(ladder))
    assert seen == [
        ("stock", False, False, 1.0), ("stock", True, False, 1.0), ("stock", True, True, 1.0),
        ("stock", True, True, 0.5), ("cpu", True, True, 1.0),
    ]  # fmt: skip
    assert ladder.metrics() == {"governor/rung": 4.0}
    assert ladder.fallback.get_mismatch_metrics


@pytest.mark.parametrize(
    ("flags", "rung"),
    [
        ({}, "stock"), ({"use_tis": True}, "tis"), ({"use_tis": True, "use_rs": True}, "mis"),
        ({"dc": DiscrepancyConfig(mode="fixed")}, "tis"),
        ({"custom_tis_function_path": "a.b"}, "tis"), ({"rs_veto_threshold": 1e-4}, "mis"),
        ({"aligned": True, "use_tis": True}, "aligned"),
    ],
)  # fmt: skip
def test_it_starts_where_the_other_flags_put_it(flags, rung):
    assert first_rung(config_of(**flags)) == rung


def test_without_a_governor_the_flags_stand():
    config = config_of(governed=False, use_tis=True, tis_upper_bound=3.0)
    assert with_stale_samples(config) == Corrections(config).flags == config.fallback


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("lag", "flags"), [(0, {}), (1, {}), (1, {"correct_lag": False})])
def test_samples_that_lag_are_weighed_or_bypassed_as_the_plan_says(aligned, lag, flags):
    config = config_of(governed=False, aligned=aligned, lag=lag, **flags)
    found, plan = with_stale_samples(config), config.plan
    assert (found.use_rollout_logprobs, found.use_tis) == (plan.bypasses_lag, plan.weighs_lag)
    assert (plan.bypasses_lag or plan.weighs_lag) == (lag > 0 and flags == {})


def test_where_samples_lag_the_probe_is_read_and_not_the_samples():
    ladder = make(lag=1)
    stale = {**BAD, "mismatch/k3": 1.0, "mismatch/ess": 0.1, "mismatch/log_ppl_abs_diff": 1.0}
    agrees = {"probe/k3": 0.0, "probe/ess": 1.0, "probe/log_ppl_abs_diff": 0.0}
    assert ladder.update({**stale, **agrees}) is None
    for reading in ({"probe/k3": 1.0}, {"probe/ess": 0.1}, {"probe/log_ppl_abs_diff": 1.0}):
        assert make(lag=1).update({**stale, **agrees, **reading}).after == "tis"


@pytest.mark.parametrize("correct_lag", [True, False])
def test_samples_that_lag_are_weighed_on_the_lowest_rung_too(correct_lag):
    ladder = make(lag=1, correct_lag=correct_lag)
    assert standing(ladder) == ("stock", correct_lag, False, 1.0)


def test_a_rollout_that_was_not_trained_on_says_nothing():
    assert make().update({"rollout/num_filtered_groups": 8.0}) is None


def test_a_resumed_ladder_stands_where_it_stood():
    first, second = make(), make()
    first.update(BAD)
    second.load_state_dict(first.state_dict())
    assert standing(second) == standing(first) == ("stock", True, False, 1.0)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"bad": "0"}, "bad='0': should be a valid integer"),
        ({"calm": -1}, "calm=-1: "),
        ({"rung": "sky"}, "rung"),
    ],
)
def test_a_state_that_no_governor_has_is_refused_by_name(changes, fault):
    state = {"rung": "stock", "bad": 0, "calm": 0, "falls": 0, **changes}
    with pytest.raises(ConfigError, match=rf"^--load: .*governor.*{fault}"):
        make().load_state_dict(state)
    del state["falls"]
    with pytest.raises(ConfigError, match=r"^--load: .*governor"):
        make().load_state_dict(state)
