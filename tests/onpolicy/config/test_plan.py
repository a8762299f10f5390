"""What a run is, whichever flags say so."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig

MODE = ["--true-on-policy-mode"]
GOVERNOR = ["--mismatch-governor"]
LAG = ["--rollout-lag", "1"]


def plan(*argv):
    return parse(TrainConfig, [*argv], "x").plan


def test_a_run_of_stock_engines_corrects_nothing_and_measures():
    stock = plan()
    assert not (stock.starts_aligned or stock.may_align or stock.may_lag or stock.corrections)
    assert not (stock.is_always_on_policy or stock.is_rank_invariant)
    assert stock.on_mismatch(is_aligned=False) == "measure"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], True), (LAG, False), (GOVERNOR, False),
        (["--parity-policy", "fallback", "--use-tis"], False), (["--parity-policy", "warn"], True),
    ],
)  # fmt: skip
def test_an_aligned_run_is_always_on_policy_unless_something_may_move_it(argv, expected):
    aligned = plan(*MODE, *argv)
    assert aligned.starts_aligned and aligned.may_align and aligned.is_rank_invariant
    assert aligned.is_always_on_policy == expected


def test_a_governed_run_may_align_and_the_policy_is_that_of_the_engines_it_is_on():
    governed = plan(*GOVERNOR)
    assert governed.may_align and not governed.starts_aligned
    assert not plan(*GOVERNOR, "--governor-highest", "mis").may_align
    assert governed.on_mismatch(is_aligned=True) == "fail"
    assert governed.on_mismatch(is_aligned=False) == "measure"
    asked = plan(*GOVERNOR, "--parity-policy", "fail")
    assert asked.on_mismatch(is_aligned=False) == "fail"


@pytest.mark.parametrize(
    ("argv", "corrections"),
    [
        (["--use-tis", "--use-rs"], ("use_tis", "use_rs")),
        (["--rs-veto-threshold", "1e-4"], ("rs_veto_threshold",)),
        (["--dc-mode", "fixed"], ("dc_mode",)),
        (["--custom-tis-function-path", "a.b.c"], ("custom_tis_function_path",)),
        (["--use-rollout-logprobs", "--get-mismatch-metrics"], ()),
    ],
)
def test_corrections_are_known_by_their_switches(argv, corrections):
    assert plan(*argv).corrections == corrections


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (MODE, "bypasses"), ([], "weighs"), ([*MODE, *GOVERNOR], "weighs"),
        ([*MODE, "--global-batch-size", "128"], "weighs"),
        ([*MODE, "--policy-loss", "reinforce"], "weighs"),
        ([*MODE, "--no-correct-lag"], ""), ([*MODE, "--use-rollout-logprobs"], ""),
        ([*MODE, "--use-tis"], ""),
    ],
)  # fmt: skip
def test_stale_samples_are_bypassed_where_engines_are_aligned_and_one_step_is_taken(argv, what):
    found = plan(*LAG, *argv)
    assert (found.bypasses_lag, found.weighs_lag) == (what == "bypasses", what == "weighs")
