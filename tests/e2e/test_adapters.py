"""Runs of adapters that lose an engine or are resumed, and what becomes of their adapters."""

import json
import signal

import psutil
import pytest

from onpolicy.cli.main import main
from tests.support.processes import is_guard
from tests.support.train_runs import ROLLOUTS, finish, metrics_of, run_hash, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.runs]

LORA = ("--lora-rank", "8")


def adapters_of(save, done=ROLLOUTS):
    return (save / f"step_{done:06d}/hf/adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def plain(start, tmp_path_factory):
    """An undisturbed run: (where it saved, hash)."""
    directory = tmp_path_factory.mktemp("plain")
    save = directory / "save"
    output = finish(start(directory, *LORA, "--save", str(save), "--save-interval", "2"))
    return save, run_hash(output)


def test_an_engine_that_is_killed_is_replaced_and_no_bit_changes(start, plain, tmp_path):
    save = tmp_path / "save"
    argv = ["--rollout-num-engines", "2", "--save", str(save), "--save-interval", "4"]
    process = start(tmp_path, *LORA, *argv)
    wait_for(lambda: len(metrics_of(tmp_path)) >= 1 or process.poll() is not None)
    servers = [child for child in psutil.Process(process.pid).children() if is_guard(child)]
    servers[-1].send_signal(signal.SIGKILL)
    output = finish(process)
    assert "starting http://127.0.0.1" in output
    assert run_hash(output) == plain[1]
    assert adapters_of(save) == adapters_of(plain[0])


def test_a_resumed_run_ends_as_the_undisturbed_one_and_with_another_scale_it_does_not(
    start, plain, tmp_path
):
    save = tmp_path / "save"
    argv = ["--load", str(plain[0] / "step_000002"), "--save", str(save), "--save-interval", "2"]
    output = finish(start(tmp_path / "resumed", *LORA, *argv))
    assert "resumed from" in output
    assert run_hash(output) == plain[1]
    assert adapters_of(save) == adapters_of(plain[0]) != adapters_of(plain[0], 2)
    output = finish(start(tmp_path / "other", *LORA, "--lora-alpha", "16"))
    assert run_hash(output) != plain[1]


def test_a_merged_checkpoint_is_served_and_both_engines_agree_on_it(
    plain, checkpoint, tmp_path, capsys
):
    merged, adapter = str(tmp_path / "merged"), str(plain[0] / "step_000004/hf")
    argv = ["export", "--hf-checkpoint", str(checkpoint), "--merge", adapter]
    assert main([*argv, "--dtype", "bfloat16", "--output", merged]) == 0
    assert "linears merged" in capsys.readouterr().out
    argv = ["verify", "--hf-checkpoint", merged, "--num-prompts", "4", "--max-new-tokens", "12"]
    assert main([*argv, "--no-step", "--run-dir", str(tmp_path / "run")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_compared_tokens"] == 2 * 4 * 12 and not report["num_mismatched_tokens"]
