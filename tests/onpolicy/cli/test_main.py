import json
import signal
import subprocess
import sys

import pytest

from onpolicy.cli.command import begin_with
from onpolicy.cli.main import COMMANDS, main
from onpolicy.compat.light_imports import OF_IMAGES, UNUSED
from onpolicy.config.tool_flags import VerifyConfig
from onpolicy.outputs.destinations import require_directory
from tests.support.chat_tokenizers import PLAIN, byte_tokenizer
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import ROOT


def test_every_command_is_listed_with_a_line_of_help(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed and line in printed for name, line in COMMANDS.items())


def test_no_command_is_an_error(capsys):
    assert main([]) == 2
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (["--lr", "fast"], "--lr: could not convert string to float: 'fast'"),
        (["--num-rollout", "1.5"], "--num-rollout: invalid literal for int() with base 10: '1.5'"),
        (["--weight-sync", "no"], "--weight-sync=no: Expected one of ('auto', 'tensor', 'ipc', "
            "'distributed', 'disk')"),
        (["--lr"], "--lr: has no value. Expected 1 values"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_one_line_too(capsys, given, rule):
    assert main(["train", *given]) == 2
    assert capsys.readouterr().err.strip() == f"ConfigError: {rule}. See onpolicy train --help"


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


@pytest.mark.parametrize("flag", ["--run-dir", "--save"])
@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_place_that_cannot_be_written_to_ends_a_dry_run_and_one_that_can_is_left_as_it_was(
    checkpoint, tmp_path, capsys, flag, command
):
    """Root may write into any directory; nobody may write below a file."""
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "ab", "label": "c"}\n')
    argv = [command, "--dry-run", "--hf-checkpoint", str(checkpoint), "--prompt-data", str(file)]
    argv += ["--rm-type", "exact"] * (command == "train")
    argv += ["--save-interval", "1"] * (flag == "--save")
    argv += ["--save-hf", str(tmp_path / "hf")] * (command == "sft" and flag != "--save")
    assert main([*argv, flag, str(file / "below")]) == 2
    assert f"{flag}={file}/below: cannot be written (Not a directory)" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [file]


def test_what_a_place_is_tried_with_is_removed(tmp_path):
    require_directory("--run-dir", str(tmp_path / "made" / "run"))
    (tmp_path / "own").mkdir()
    require_directory("--run-dir", str(tmp_path / "own"))
    assert [path.name for path in tmp_path.rglob("*")] == ["own"]


def test_a_place_without_room_is_refused(tmp_path):
    """A limit of a process's files is what a full disk is to it."""
    script = (
        "import resource, sys; from onpolicy.outputs.destinations import require_directory; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); "
        "require_directory('--save', sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True
    )
    assert f"--save={tmp_path}: cannot be written (File too large)" in done.stderr


def test_a_second_server_in_one_run_directory_is_refused(checkpoint, tmp_path, capsys):
    script = (
        "import sys; from pathlib import Path; from onpolicy.outputs.lock import locked; "
        "held = locked(Path(sys.argv[1]), '--run-dir'); held.__enter__(); "
        "print('held', flush=True); sys.stdin.readline()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        first.stdout.readline()
        assert main(["serve", "--hf-checkpoint", str(checkpoint), "--run-dir", str(tmp_path)]) == 2
        assert f"process {first.pid} on" in capsys.readouterr().err
        first.stdin.close()


def test_sigterm_is_said_and_ends_a_command_with_its_code():
    script = (
        "import os, signal, subprocess, sys, onpolicy.cli.data as data\n"
        "from onpolicy.cli import main as cli\n"
        "def command(argv):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
        "    finally:\n"
        "        print('left', flush=True)\n"
        "data.main = command\n"
        "sys.exit(cli.main(['data']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (143, "left\n")
    assert done.stderr.strip().startswith("SIGTERM: this command was asked to end")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_ends_whose_destructor_swallowed_the_signal(number):
    script = (
        "import os, signal, sys, onpolicy.cli.data as data\n"
        "from onpolicy.cli import main as cli\n"
        "from onpolicy.system import ending\n"
        "class Swallows:\n"
        "    def __del__(self):\n"
        f"        os.kill(os.getpid(), {number:d})\n"
        "def command(argv):\n"
        "    Swallows()\n"
        "    print('goes on', flush=True)\n"
        "    while True:\n"
        "        signal.pause()\n"
        "data.main, ending.SECONDS = command, 0.1\n"
        "sys.exit(cli.main(['data']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (-number, b"goes on\n")
    assert b"did not end within 0.1 s of " + number.name.encode() in done.stderr
    assert b"in command" in done.stderr


def test_a_command_of_the_background_ignores_ctrl_c():
    script = (
        "import os, signal, sys, onpolicy.cli.data as data\n"
        "from onpolicy.cli import main as cli\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "data.main = lambda argv: os.kill(os.getpid(), signal.SIGINT) or 7\n"
        "sys.exit(cli.main(['data']))\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 7


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


def test_a_result_may_be_written_beside_logs_that_are_not_there_yet(tmp_path):
    logs = tmp_path / "logs"
    begin_with(VerifyConfig(run_dir=str(logs / "run"), json=str(logs / "run.json")))
    assert not logs.exists()


HEAVY = {
    "torch", "sglang", "ray", "matplotlib", "math_verify", "torch.distributed.checkpoint",
    *UNUSED, *OF_IMAGES,
}  # fmt: skip


@pytest.mark.long
def test_a_dry_run_of_the_quickstart_imports_torch_for_its_contract_and_no_engine(tmp_path):
    """The shapes that a contract holds, and whether its model can be aligned, are those of the model
    that transformers builds without weights; which operators there are is torch's word."""
    model = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=1, vocab_size=400)
    byte_tokenizer(PLAIN).save_pretrained(model)
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "label": f"{i + 1}"}) + "\n" for i in range(32))
    )
    argv = [
        "train", "--custom-config-path", str(ROOT / "examples/quickstart/config.yaml"),
        "--hf-checkpoint", str(model), "--prompt-data", str(data), "--eval-prompt-data", str(data),
        "--run-dir", str(tmp_path / "run"), "--dry-run",
    ]  # fmt: skip
    code = f"import sys; from onpolicy.cli.main import main; assert main({argv}) == 0"
    code += f"; print(*sorted({HEAVY} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["torch"]
