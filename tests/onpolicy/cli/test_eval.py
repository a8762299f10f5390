"""Which flags of a run an evaluation takes, and what CHECKPOINT may be."""

import json

import pytest

from onpolicy.cli import eval as command
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.config.rules import require_ranges, require_sense
from onpolicy.config.tool_flags import EvaluateConfig
from onpolicy.errors import ConfigError
from onpolicy.run.saving.checkpoint import find_published

RUN = [
    "--hf-checkpoint", "origin", "--prompt-data", "p.jsonl", "--custom-rm-path", "mine.score",
    "--group-rm", "--eval-prompt-data", "a", "a.jsonl", "b", "b.jsonl", "--eval-interval", "5",
    "--rollout-top-p", "0.9",
    "--eval-temperature", "0.5", "--seed", "7", "--dtype", "float32", "--rollout-num-engines", "4",
    "--rollout-stop-token-ids", "3", "4", "--sglang-context-length", "512", "--trust-remote-code",
]  # fmt: skip


def recorded(*more):
    """What a run with these flags writes down."""
    config = parse(TrainConfig, [*RUN, *more], "onpolicy train")
    return json.loads(json.dumps(config.to_dict()))


def evaluated(record, *argv):
    """The run of no rollouts that an evaluation of its checkpoint is."""
    argv = ["ck", *argv]
    taken = [*command._of_the_run(record, parse(EvaluateConfig, argv, "x"))]
    config = parse(EvaluateConfig, [*taken, *argv], "x")
    assert config.checkpoint == "ck"
    require_ranges(config)
    train_config = config.train_config("hf")
    require_sense(train_config)
    return train_config


def test_what_decides_an_evaluation_is_taken_from_the_run_and_nothing_else():
    run, own = parse(TrainConfig, RUN, "x"), evaluated(recorded())
    for name in (
        "n_samples_per_eval_prompt", "eval_temperature", "eval_prompt_data",
    ):  # fmt: skip
        assert getattr(own.eval, name) == getattr(run.eval, name), name
    assert own.reward == run.reward and own.seed == 7 and own.sglang_args == run.sglang_args
    assert (own.rollout.rollout_top_p, own.rollout.rollout_stop_token_ids) == (0.9, (3, 4))
    assert own.model.dtype == "float32" and own.model.hf_checkpoint == "hf"
    assert not own.parity.true_on_policy_mode and not own.takes_steps
    assert not own.model.trust_remote_code and own.engine.rollout_num_engines == 1


def test_flags_of_the_user_win_and_other_rewards_and_sets_leave_the_runs_out():
    own = evaluated(
        recorded(), "--rm-type", "exact", "--seed", "8", "--eval-prompt-data", "c.jsonl"
    )
    assert own.reward.sources == {"exact": 1.0} and not own.reward.group_rm
    assert (own.seed, own.eval.eval_temperature) == (8, 0.5)
    assert [each.path for each in own.eval_sets.values()] == ["c.jsonl"]


@pytest.mark.parametrize(
    ("more", "blocks"),
    [
        (["--train-backend", "megatron", "--megatron-tp", "4"], 0),
        (["--train-backend", "megatron", "--megatron-tp", "4", "--true-on-policy-mode"], 4),
        (["--true-on-policy-mode", "--row-parallel-blocks", "2"], 2),
        (["--true-on-policy-mode"], 0),
    ],
)
def test_sums_keep_the_order_that_the_ranks_of_the_run_gave_them(more, blocks):
    assert evaluated(recorded(*more)).operators.row_parallel_blocks == blocks


def test_a_key_of_the_run_is_asked_for_by_name():
    remote = ["--custom-rm-path", "", "--no-group-rm", "--rm-type", "remote_rm"]
    record = recorded(*remote, "--rm-url", "http://h:1/x", "--rm-api-key", "secret")
    with pytest.raises(ConfigError, match="--rm-api-key is missing"):
        evaluated(record)


def test_without_a_set_or_a_reward_there_is_nothing_to_do():
    with pytest.raises(ConfigError, match="neither is given"):
        evaluated({})
    with pytest.raises(ConfigError, match="no reward scores its responses"):
        evaluated({}, "--eval-prompt-data", "c.jsonl")


def test_adapters_and_servers_of_the_run_that_wrote_a_checkpoint_are_left_out():
    """Its checkpoint is one of all weights, or refused where it is read."""
    url = ["--rollout-server-url", "http://127.0.0.1:3", "--rollout-num-engines", "1"]
    own = evaluated(recorded(*url, "--true-on-policy-mode", "--lora-rank", "8"))
    assert own.lora.lora_rank == 0 == len(own.engine.rollout_server_url)


def test_a_directory_without_a_checkpoint_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match="neither a Hugging Face checkpoint nor one of a run"):
        find_published(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"save": ""}))
    assert find_published(str(tmp_path)).hf_checkpoint == tmp_path
    (tmp_path / "contract.json").write_text("{}")
    with pytest.raises(ConfigError, match="saved no checkpoint"):
        find_published(str(tmp_path))
    with pytest.raises(ConfigError, match="CHECKPOINT is missing"):
        command.main([])
