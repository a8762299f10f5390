"""Every combination of flags that is accepted trains; every other is refused before anything starts."""

import re
from itertools import islice

import pytest
import torch

from onpolicy.config import TrainConfig, groups, validate
from onpolicy.errors import ConfigError, ParityError
from onpolicy.train import policy_trainer
from tests.support.combinations import Combinations
from tests.support.policies_in_memory import SIZES, PolicyMemory, checked_operators, run_policy
from tests.support.tiny import make_checkpoint
from tests.support.unstarted_run import changed

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("undrawn")]

ROWS = 75
"""In the tests that are always run."""

NOT_HERE = {
    "agent": "one turn is what is trained on here",
    "cluster": "one process",
    "engine": "engines in memory have no flags of SGLang's",
    "eval": "decides no weight",
    "megatron": "read by --train-backend megatron alone",
    "operators": "by the machine",
    "reward": "scored in memory",
    "output": "where a run writes",
    "sync": "how weights travel",
}
"""Groups that are left out, and why."""

NOT_THESE = {
    "num_rollout": "two steps",
    "seed": "any other is as good",
    "train_backend": "megatron needs a process of its own",
    "use_rollout_routing_replay": "the tiny model has no experts",
    "dynamic_sampling_limit": "a smaller one may end a run",
    "apply_chat_template": "prompts are made in memory",
    "reasoning_gym_size": "prompts are made in memory",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("combinations")
    checkpoint = make_checkpoint(directory / "checkpoint", "qwen3", **SIZES)
    return TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=str(checkpoint), dtype="float32"),
        data=groups.DataConfig(prompt_data=("prompts.jsonl",)),
        reward=groups.RewardConfig(rm_type="exact"),
        rollout=groups.RolloutConfig(
            num_rollout=2, rollout_batch_size=2, n_samples_per_prompt=4, rollout_max_response_len=4
        ),
        trainer=groups.TrainerConfig(lr=1e-3, max_tokens_per_gpu=64),
        parity=groups.ParityConfig(true_on_policy_mode=True),
        engine=groups.EngineConfig(cpu_threads=1),
        sync=groups.WeightSyncConfig(weight_sync="disk"),
        output=groups.OutputConfig(run_dir=str(directory / "run")),
    )


@pytest.fixture(scope="module")
def combinations(base):
    def refusal(row):
        try:
            validate(changed(base, **row))
        except ConfigError as error:
            return error
        return None

    def is_outside(flag):
        return flag.path[0] in NOT_HERE or flag.name in NOT_THESE

    return Combinations(base, refusal, is_outside)


@pytest.fixture(scope="module")
def rows(combinations):
    """The whole array, or its first rows, which have every value and nearly every pair."""
    return [*islice(combinations.rows(), ROWS)]


@pytest.mark.parametrize("number", range(ROWS))
def test_what_is_accepted_trains(base, rows, number, tmp_path, monkeypatch):
    if number >= len(rows):
        return  # all pairs are in those before
    check(changed(base, **rows[number], run_dir=str(tmp_path / "run")), monkeypatch)


def check(config, monkeypatch):
    """Train two steps."""
    monkeypatch.setattr(policy_trainer, "checked_operators", checked_operators)
    if not config.plan.starts_aligned and config.plan.on_stock_mismatch == "fail":
        with pytest.raises(ParityError):  # the engine of these tests differs from a stock trainer
            run_policy(config)
        return
    summary, weights = run_policy(config)
    assert summary.rollouts == 2
    assert all(weight.isfinite().all() for weight in weights.values())
    if config.plan.starts_aligned:
        assert summary.totals.num_compared_tokens > 0
        assert summary.totals.num_mismatched_tokens == 0


@pytest.mark.runs
def test_so_does_what_is_left(base, combinations, rows, tmp_path, monkeypatch):
    for number, row in enumerate(combinations.rows()):
        check(changed(base, **row, run_dir=str(tmp_path / str(number))), monkeypatch)


def test_an_engine_that_is_a_bit_off_ends_a_run(base, tmp_path, monkeypatch):
    right = PolicyMemory.score

    def wrong(self, context, temperature):
        return torch.nextafter(right(self, context, temperature), torch.tensor(0.0))

    monkeypatch.setattr(PolicyMemory, "score", wrong)
    with pytest.raises(ParityError):
        check(changed(base, run_dir=str(tmp_path)), monkeypatch)


def test_every_value_of_every_flag_is_accepted_with_something(combinations):
    assert [item for item in combinations.values if item not in combinations.carriers] == []


def test_every_value_is_trained_with(combinations, rows):
    trained = {item for row in rows for item in row.items()}
    assert set(combinations.values) <= trained


def test_refusals_say_what_is_wrong_the_rule_and_the_remedy(combinations, rows):
    said = {str(error) for error in combinations.refusals.values()}
    assert len(said) > 20
    assert [text for text in said if not re.fullmatch(r"--[a-z-]+\S*: .+\. .+\.", text)] == []
