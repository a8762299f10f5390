"""Whether prefixes are shared where nobody asked, and what a plan says of it."""

import pytest
import torch

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.models.policy import PackedTokens
from onpolicy.models.shared_prefixes import share_prefixes
from onpolicy.run.launch.input_checks import distinct_share, fit_sharing, sharing_described

ALIGNED = "--true-on-policy-mode"
AGENT = ("--custom-agent-function-path", "agents.py:episode")


def chosen(*argv):
    return fit_sharing(parse(TrainConfig, argv, "x")).trainer


@pytest.mark.parametrize(
    ("argv", "choice"),
    [
        ((ALIGNED,), "on"),
        ((ALIGNED, "--train-backend", "megatron", "--megatron-tp", "2"), "on"),
        ((ALIGNED, "--n-samples-per-prompt", "1", *AGENT), "on"),
        ((ALIGNED, "--n-samples-per-prompt", "1"), "off"),
        ((ALIGNED, "--train-backend", "megatron", "--megatron-cp", "2"), "off"),
        ((ALIGNED, "--mismatch-governor"), "off"),
        ((ALIGNED, "--share-prefixes", "off"), "off"),
        ((), "off"),
    ],
)
def test_prefixes_are_shared_by_default_where_operators_are_aligned_and_nothing_contradicts(
    argv, choice
):
    trainer = chosen(*argv)
    assert (trainer.share_prefixes, trainer.shares_prefixes) == (choice, choice == "on")


def test_on_a_gpu_they_are_shared_only_where_somebody_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert chosen(ALIGNED).share_prefixes == "off"
    assert chosen(ALIGNED, "--share-prefixes", "on").share_prefixes == "on"


def test_the_share_of_a_plan_is_that_of_groups_that_are_whole():
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    samples = [p + [20 + n] * 5 for p in prompts for n in range(4)]
    whole = PackedTokens.after_prompts(samples, [len(s) - 5 for s in samples], 1.0)
    share = len(share_prefixes(whole).tokens) / len(whole.tokens)
    assert distinct_share([3, 7], 5, 4) == share == 50 / 80


def test_of_episodes_no_share_is_foretold():
    config = fit_sharing(parse(TrainConfig, (ALIGNED, *AGENT), "x"))
    assert sharing_described(config, [3]).endswith("how much that saves is up to the episodes")
