"""What a run is, whichever flags say so."""

import re
from pathlib import Path

import pytest

import onpolicy
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig

MODE = ["--true-on-policy-mode"]
GOVERNOR = ["--mismatch-governor"]
LAG = ["--rollout-lag", "1"]
TOUCHES_FLAGS = re.compile(r"\bparity\.(true_on_policy_mode|parity_policy)\b|\bmismatch_governor\b")


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


def test_stale_samples_are_weighed_unless_asked_not_to_be():
    assert plan(*LAG).weighs_lag and not plan(*LAG, "--no-correct-lag").weighs_lag
    assert not plan().weighs_lag
    for argv in (["--rollout-segment-tokens", "4"], ["--rollout-schedule", "free"]):
        assert plan(*argv).may_lag


def test_nobody_else_asks_the_flags_what_a_run_is():
    """Beside the plan: rules of flags about each other, and what makes flags of flags."""
    allowed = {
        "config/plan.py", "config/unread.py", "config/corrections.py", "config/groups/correction.py",
        "run/ladder.py",
    }  # fmt: skip
    root = Path(onpolicy.__file__).parent
    asking = {
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        if TOUCHES_FLAGS.search(file.read_text())
    }
    assert asking <= allowed, asking - allowed
