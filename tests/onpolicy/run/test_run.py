"""What a run finds wrong before it starts an engine."""

import shutil
from dataclasses import replace

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.errors import ConfigError
from onpolicy.rewards.scorer import Scorer
from onpolicy.run import saving
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.inputs import read_inputs
from onpolicy.run.run import Run
from onpolicy.training import distributed
from tests.support.unstarted_run import make_run, state_after


class EnginesStarted(Exception):
    """The run found nothing wrong."""


@pytest.fixture
def start(checkpoint, tmp_path, monkeypatch):
    """Starts a run as far as its engines."""
    distributed.init_process_group()
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "ab", "label": "c"}\n')

    def started(self):
        raise EnginesStarted

    monkeypatch.setattr(EnginePair, "start", started)

    def start_run(*argv):
        argv = [
            "--hf-checkpoint", str(checkpoint), "--prompt-data", str(data), "--rm-type", "exact",
            "--dtype", "float32", "--true-on-policy-mode", "--num-rollout", "9",
            "--rollout-batch-size", "1", "--rollout-max-response-len", "8",
            "--run-dir", str(tmp_path / "run"), *map(str, argv),
        ]  # fmt: skip
        config = parse(TrainConfig, argv, "onpolicy train")
        validate(config)
        with Run(config, read_inputs(config, Scorer(config.reward))):
            pass

    return start_run


def test_a_sound_run_comes_to_its_engines(start, tmp_path):
    with pytest.raises(EnginesStarted):
        start("--save", tmp_path / "save", "--load", tmp_path / "save", "--save-interval", 2)
    assert (tmp_path / "run" / "config.json").is_file()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--load", "TMP/typo"], r"^--load=.*/typo: no such directory"),
        (["--save", "TMP/data.jsonl", "--save-interval", "1"],
         r"^--save=.*data.jsonl: cannot be written \(File exists\)"),
        (["--save", "TMP/data.jsonl/x", "--save-interval", "1"], r"^--save=.*: cannot be written \(No"),
        (["--save", "/proc/onpolicy", "--save-interval", "1"],
         r"^--save=/proc/onpolicy: cannot be written \(No such file"),
        (["--run-dir", "/proc/onpolicy"], r"^--run-dir=/proc/.*: cannot be written \(No such file"),
        (["--run-dir", "TMP/data.jsonl"], r"^--run-dir=.*: cannot be written \(File exists\)"),
    ],
)  # fmt: skip
def test_a_directory_that_will_not_do_is_refused(start, tmp_path, argv, message):
    with pytest.raises(ConfigError, match=message):
        start(*(arg.replace("TMP", str(tmp_path)) for arg in argv))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_disk_without_room_for_a_checkpoint_is_refused(start, tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(2**30, 2**30 - 2**20, 2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"--save=.*: a checkpoint takes .* are free there"):
        start("--save", tmp_path / "save", "--save-interval", 2)
    with pytest.raises(EnginesStarted):  # which saves nothing
        start()


@pytest.fixture
def resumable(checkpoint, tmp_path):
    """A directory with a checkpoint of a run like those that `start` starts."""
    saving.save(*make_run(checkpoint, tmp_path), replace(state_after(4), evaluations={}))
    return tmp_path / "save"


def test_a_run_continues_what_the_checkpoint_says(start, resumable, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Run, "_open_directory", lambda run, resumed: seen.append(run))
    argv = ["--load", resumable, "--allow-changed-settings", *ANOTHER_RECIPE]
    with pytest.raises(EnginesStarted):
        start(*argv)
    (run,) = seen
    assert (run.first_step, run.rollouts_done, run.totals) == (4, 4, state_after(4).totals)
    assert run.run_hash.value == "hash"


ANOTHER_RECIPE = ("prompt_data", "rollout_max_response_len", "rollout_batch_size", "rm_type")


@pytest.mark.parametrize("of_another", [False, True])
def test_a_resumed_run_goes_on_in_its_own_directory_and_moves_anothers_aside(
    start, resumable, tmp_path, of_another
):
    argv = ["--load", resumable, "--allow-changed-settings", *ANOTHER_RECIPE]
    with pytest.raises(EnginesStarted):
        start(*argv)
    run, moved = tmp_path / "run", tmp_path / "run.1"
    (run / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4}\n')
    if of_another:
        (run / "config.json").write_text('{"lr": 1}')
    with pytest.raises(EnginesStarted):
        start(*argv, "--rollout-num-engines", 2)
    assert moved.exists() == of_another
    lines = (moved if of_another else run) / "metrics.jsonl"
    assert lines.read_text() == '{"step": 3}\n{"step": 4}\n'


def test_a_command_that_is_given_again_starts_though_it_saves_inside_its_run_directory(
    start, tmp_path
):
    save = tmp_path / "run" / "save"
    argv = ["--save", save, "--load", save, "--save-interval", 2]
    for number in (1, 2):
        with pytest.raises(EnginesStarted):
            start(*argv)
        assert save.is_dir() and len(list(tmp_path.glob("run.*"))) == number - 1
        (tmp_path / "run" / "metrics.jsonl").write_text("")


def test_a_checkpoint_is_not_moved_aside_with_another_runs_directory(start, resumable, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    load = resumable.rename(run / "save")
    with pytest.raises(
        ConfigError, match=r"holds an earlier run, which .* aside with --load \S+ in it"
    ):
        start("--load", load, "--allow-changed-settings", *ANOTHER_RECIPE)


def test_other_settings_than_the_checkpoints_are_refused(start, resumable):
    with pytest.raises(ConfigError) as refused:
        start("--load", resumable)
    names = " ".join(ANOTHER_RECIPE[1:])  # of prompts the contents are compared, once they are read
    assert str(refused.value).endswith(f"add --allow-changed-settings {names}")


def test_what_a_killed_push_left_is_swept_and_the_users_own_files_are_not(start, tmp_path):
    leftover = tmp_path / "run" / f".weights_{'0' * 32}"
    own = tmp_path / "run" / "weights"
    for directory in (leftover, own):
        directory.mkdir(parents=True)
        (directory / "model-00000.safetensors").write_text("")
    with pytest.raises(EnginesStarted):
        start("--weight-sync", "disk")
    assert not leftover.exists()
    assert (own / "model-00000.safetensors").exists()


def test_a_dry_run_looks_at_the_checkpoint_too(checkpoint, tmp_path, capsys):
    from onpolicy.cli.main import main

    (tmp_path / "data.jsonl").write_text('{"prompt": "ab", "label": "c"}\n')
    argv = ["train", "--dry-run", "--hf-checkpoint", str(checkpoint), "--rm-type", "exact"]
    argv += ["--prompt-data", f"{tmp_path}/data.jsonl", "--rollout-max-response-len", "8"]
    argv += ["--rollout-batch-size", "1"]
    assert main([*argv, "--load", f"{tmp_path}/typo"]) == 2
    assert "typo: no such directory" in capsys.readouterr().err
