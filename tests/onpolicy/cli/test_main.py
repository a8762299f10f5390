import signal
import subprocess
import sys

import pytest

from onpolicy.cli.main import COMMANDS, main


def test_every_command_is_listed_with_a_line_of_help(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed and line in printed for name, line in COMMANDS.items())


def test_an_unknown_command_is_an_error(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'" in capsys.readouterr().err


def test_no_command_is_an_error(capsys):
    assert main([]) == 2
    assert "usage" in capsys.readouterr().out


def test_a_mistake_of_the_users_is_one_line_not_a_traceback(capsys):
    argv = ["train", "--hf-checkpoint", "/m", "--prompt-data", "/d", "--rm-type", "exact"]
    assert main([*argv, "--rollout-batch-size", "0"]) == 2
    assert capsys.readouterr().err.strip() == (
        "ConfigError: --rollout-batch-size=0: must be at least 1. Give a larger value."
    )


@pytest.fixture
def dry_run(checkpoint, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "ab", "label": "c"}\n')
    return [
        "train", "--dry-run", "--hf-checkpoint", str(checkpoint), "--prompt-data", str(data),
        "--rm-type", "exact", "--rollout-max-response-len", "8", "--true-on-policy-mode",
        "--rollout-batch-size", "1",
    ]  # fmt: skip


def test_a_dry_run_prints_the_resolved_configuration_and_the_batch_equation(dry_run, capsys):
    assert main(dry_run) == 0
    printed = capsys.readouterr().out
    assert '"rollout_max_response_len": 8' in printed
    assert "rollout_batch_size 1 prompts x n_samples_per_prompt 8 = 8 samples" in printed
    assert "1 prompts; contract " in printed


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "prefixes are shared: 8 responses of at most 8 tokens to a prompt of 2 "
            "have at most 82% distinct tokens"),  # 2 + 8 x 8 of 8 x 10
        (["--share-prefixes", "off"], "prefixes are not shared (--share-prefixes off): 8 responses"),
        (["--no-true-on-policy-mode"], "prefixes are not shared (operators that are not"),
    ],
)  # fmt: skip
def test_a_dry_run_says_whether_prefixes_are_shared_and_what_that_leaves(
    dry_run, argv, said, capsys
):
    assert main([*dry_run, *argv]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rollout-max-response-len", "300"], "does not fit the model's context of 256"),
        (["--rollout-max-response-len", "252"], "the prompt has 2 tokens.* 2"),
        (["--label-key", "answer"], "data.jsonl:1: no field 'answer'"),
    ],
)
def test_a_dry_run_finds_what_the_data_and_the_model_do_not_allow(dry_run, argv, message, capsys):
    import re

    code = main([*dry_run, *argv])
    error = capsys.readouterr().err
    assert (code == 2 and re.search(message, error)) or (code == 0 and "252" in argv)


def test_the_installed_command_runs():
    done = subprocess.run([sys.executable, "-m", "onpolicy.cli", "--help"], capture_output=True)
    assert done.returncode == 0


def test_help_may_be_read_in_part():
    """Nothing is said when the reader has gone."""
    command = [sys.executable, "-m", "onpolicy.cli", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() in (0, -signal.SIGPIPE)
