import json
import subprocess
import sys

import pytest
import yaml

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.config.flags import flag_defaults, flag_types, flag_values, flags_of
from onpolicy.config.tool_flags import BenchConfig, ServeConfig, VerifyConfig
from onpolicy.errors import ConfigError


def train(*argv):
    return parse(TrainConfig, argv, "onpolicy train")


@pytest.fixture
def overlay(tmp_path):
    def write(text):
        file = tmp_path / "config.yaml"
        file.write_text(text)
        return "--custom-config-path", str(file)

    return write


def test_flags_have_their_field_names_without_groups():
    config = train("--hf-checkpoint", "/m", "--eps-clip-high", "0.3", "--true-on-policy-mode")
    assert config.model.hf_checkpoint == "/m"
    assert config.eps_clip_high == 0.3
    assert config.parity.true_on_policy_mode


def test_yaml_sets_defaults_and_the_command_line_wins(overlay):
    file = overlay(
        "lr: 0.5\nrollout_batch_size: 6\nshuffle: false\nrollout_stop_token_ids: [3, 4]\n"
    )
    config = train(*file, "--rollout-batch-size", "9")
    assert (config.trainer.lr, config.rollout.rollout_batch_size) == (0.5, 9)
    assert config.data.shuffle is False
    assert config.rollout.rollout_stop_token_ids == (3, 4)


def test_every_default_can_be_written_in_yaml_and_changes_nothing(overlay):
    defaults = flag_defaults(TrainConfig)
    defaults.pop("custom_config_path")
    file = overlay(yaml.safe_dump(json.loads(json.dumps(defaults))))  # of plain lists and numbers
    assert flag_values(train(*file)) == {
        **flag_values(TrainConfig()),
        "custom_config_path": file[1],
    }


def test_a_value_of_another_kind_is_refused_in_yaml_for_every_flag(overlay, subtests):
    for name in flag_types(TrainConfig):
        with subtests.test(name), pytest.raises(ConfigError, match=rf"config.yaml: {name}"):
            train(*overlay(f"{name}: {{a: 1}}"))


def test_an_empty_yaml_file_changes_nothing(overlay):
    assert train(*overlay("")).trainer == TrainConfig().trainer


def test_sglang_flags_are_collected_in_order_with_their_values(overlay):
    config = train(
        *overlay("sglang_chunked_prefill_size: 48\nsglang_disable_radix_cache: true\n"),
        "--sglang-tp-size", "2", "--lr", "0.1", "--sglang-log-requests",
    )  # fmt: skip
    assert config.sglang_args == (
        "--chunked-prefill-size", "48", "--disable-radix-cache", "--tp-size", "2", "--log-requests",
    )  # fmt: skip
    assert config.trainer.lr == 0.1


def test_the_flags_are_the_ones_that_users_know():
    known = set(flag_types(TrainConfig))
    assert known >= {
        "hf_checkpoint", "prompt_data", "input_key", "label_key", "apply_chat_template",
        "rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_rollout",
        "rollout_max_response_len", "rollout_temperature", "rm_type", "custom_rm_path",
        "advantage_estimator", "eps_clip", "eps_clip_high", "lr", "train_backend",
        "true_on_policy_mode", "custom_config_path", "save", "save_interval", "load", "use_wandb",
        "use_tensorboard", "eval_interval", "eval_prompt_data", "parity_policy",
        "max_tokens_per_gpu", "rollout_num_engines", "rollout_server_url", "weight_sync",
    }  # fmt: skip


@pytest.mark.parametrize("config_class", [TrainConfig, VerifyConfig, BenchConfig, ServeConfig])
def test_no_flag_is_without_help(config_class):
    assert [flag.name for flag in flags_of(config_class) if not flag.help] == []


def test_help_needs_no_heavy_import():
    """What makes --help answer in under a second: nothing below is loaded for it."""
    commands = ["train", "data", "verify", "bench", "serve"]
    code = (
        "import contextlib, sys\n"
        "from onpolicy.cli.main import main\n"
        f"for command in {commands}:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main([command, '--help'])\n"
        "heavy = {'torch', 'transformers', 'sglang', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: onpolicy {command}" in done.stdout for command in commands)


def test_verify_and_bench_take_the_training_engine():
    argv = ["--train-backend", "megatron", "--megatron-tp", "2"]
    config = parse(VerifyConfig, argv, "x")
    assert (config.train_backend, config.megatron.megatron_tp) == ("megatron", 2)
    both = parse(BenchConfig, ["step", "--train-backend", "fsdp,megatron"], "x")
    assert both.train_backend == "fsdp,megatron"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--num_generations", "8"], "--num_generations: unknown flag. It is --n-samples-per-"),
        (["--max-completion-length=8"], "It is --rollout-max-response-len here."),
        (["--num-generatoins", "8"], "unknown flag. See"),
        (
            ["--prompt-data", "a.jsonl", "actor_rollout_ref.rollout.n=8"],
            "actor_rollout_ref.rollout.n=8: is an override of verl's, and flags are --name VALUE. "
            "It is --n-samples-per-prompt here.",
        ),
        (["+trainer.logger=console"], "+trainer.logger=console: is an override of verl's"),
    ],
)  # fmt: skip
def test_names_of_other_libraries_are_told_by_ours(argv, says):
    with pytest.raises(ConfigError) as refused:
        train(*argv)
    assert says in str(refused.value)


def test_every_flag_that_another_librarys_name_is_told_by_is_one():
    from onpolicy.cli.gone_flags import OURS

    assert {*OURS.values()} <= {*flag_types(TrainConfig)}


def test_a_named_evaluation_set_is_no_override():
    config = train("--eval-prompt-data", "data=a.jsonl", "math.test=b.jsonl")
    assert len(flag_values(config)["eval_prompt_data"]) == 2
