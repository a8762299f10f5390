"""Checkpoints are written completely or not at all, old ones deleted only then, and the best is kept."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onpolicy.config.groups import OutputConfig
from onpolicy.errors import ConfigError
from onpolicy.run import saving
from onpolicy.run.saving import Best, better, write
from onpolicy.run.saving.checkpoint import checkpoints, read
from tests.support.forked_processes import forked_processes
from tests.support.policies_in_memory import run_policy
from tests.support.run_in_memory import run_in_memory
from tests.support.tiny_combinations import make_base
from tests.support.unstarted_run import EVALUATIONS, PROMPTS, changed, make_run, state_after

HERE = Path(__file__).parent
ROOT = HERE.parents[3]

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
MESSAGE = r"step_00000{} could not be written \(.+\)\. The latest .*step_00000{}\. Free .*--load"


def run_script(name, *argv, before=()):
    command = [*before, sys.executable, str(HERE / name), *map(str, argv)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def names(save):
    """What lies under --save, less the lock."""
    return sorted({path.name for path in save.iterdir()} - {".lock"})


def test_a_full_disk_at_save_keeps_the_earlier_checkpoint_and_says_what_to_do(checkpoint, tmp_path):
    with forked_processes():
        output = run_script("full_disk.py", checkpoint, tmp_path)
    assert len(re.findall(MESSAGE.format(4, 2), output)) == 6, output
    assert output.count("could not be written (") == output.count("File too large") == 6
    assert output.endswith("['step_000002']\nresumes after 2\nwith space, saves 4\n")


@pytest.fixture(scope="module")
def on_a_small_disk(checkpoint, tmp_path_factory):
    """What small_disk.py prints. Its disk is mounted in a namespace of its own."""
    disk = tmp_path_factory.mktemp("disk")
    mount = f'mount -t tmpfs -o size=11m tmpfs {disk} && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if not shutil.which("unshare") or subprocess.run([*command, "true"]).returncode:
        pytest.skip("may mount nothing here")
    return run_script("small_disk.py", checkpoint, disk, before=command).partition("keeping 0")


def test_a_disk_that_runs_full_ends_the_run_with_the_earlier_checkpoints(on_a_small_disk):
    message, _, then = on_a_small_disk
    assert re.search(MESSAGE.format(6, 4), message)
    assert "; 0.00 GiB are free there)" in message
    assert then.startswith(": resumes after 4\n")


def test_a_disk_with_room_for_two_takes_any_number_of_which_one_is_kept(on_a_small_disk):
    assert on_a_small_disk[2].splitlines()[1:] == ["keeping 1: resumes after 8"]


@pytest.fixture(scope="module")
def unstarted(checkpoint, tmp_path_factory):
    return make_run(checkpoint, tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(unstarted, tmp_path):
    config, engines = unstarted
    save = tmp_path / "save"
    return changed(config, save=str(save), load=str(save)), engines, save


def test_the_newest_checkpoints_are_kept(run):
    config, engines, save = run
    config = changed(config, keep_checkpoints=2)
    for done in (2, 4, 6, 8):
        saving.save(config, engines, state_after(done))
    assert names(save) == ["step_000006", "step_000008"]
    assert saving.find(config, PROMPTS, EVALUATIONS).state == state_after(8)


def test_an_old_checkpoint_goes_only_when_the_new_one_is_complete(run, monkeypatch):
    config, engines, save = run
    config = changed(config, keep_checkpoints=1)
    saving.save(config, engines, state_after(2))
    monkeypatch.setattr(engines.trainer, "export", lambda directory: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        saving.save(config, engines, state_after(4))
    assert saving.find(config, PROMPTS, EVALUATIONS).state == state_after(2)
    monkeypatch.undo()
    saving.save(config, engines, state_after(4))
    assert list(checkpoints(save)) == [4]


def test_checkpoints_that_a_run_was_resumed_from_elsewhere_are_kept(run, saved, tmp_path):
    config, engines, save = run
    other = shutil.copytree(saved, tmp_path / "other")
    config = changed(config, load=str(other), keep_checkpoints=1)
    assert saving.find(config, PROMPTS, EVALUATIONS).state == state_after(4)
    saving.save(config, engines, state_after(6))
    assert list(checkpoints(other)) == [2, 4]
    assert list(checkpoints(save)) == [6]


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_none_half_there(run, monkeypatch):
    config, engines, save = run
    config = changed(config, keep_checkpoints=1)
    saving.save(config, engines, state_after(2))

    def killed(directory, **options):
        (directory / "numbers.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(write.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        saving.save(config, engines, state_after(4))
    monkeypatch.undo()
    assert names(save) == [".partial_step_000002", "step_000004"]
    assert saving.find(config, PROMPTS, EVALUATIONS).state == state_after(4)
    saving.save(config, engines, state_after(6))
    assert names(save) == ["step_000006"]


def test_a_damaged_checkpoint_in_the_way_is_set_aside(run):
    config, engines, save = run
    for done in (2, 4):
        saving.save(config, engines, state_after(done))
    (save / "step_000004" / "numbers.json").write_text("{}")
    saving.find(changed(config, load=str(save / "step_000002")), PROMPTS, EVALUATIONS)
    saving.save(config, engines, state_after(4))
    assert (save / "step_000004.damaged1" / "numbers.json").read_text() == "{}"
    assert saving.find(config, PROMPTS, EVALUATIONS).state == state_after(4)


def test_all_files_may_be_read_by_those_who_may_read_their_neighbours(run, checkpoint, tmp_path):
    config, engines, save = run
    source = shutil.copytree(checkpoint, tmp_path / "model")
    for file in source.iterdir():
        file.chmod(0o400)
    before = os.umask(0o027)
    try:
        saving.save(changed(config, hf_checkpoint=str(source)), engines, state_after(2))
    finally:
        os.umask(before)
    modes = {p.name: p.stat().st_mode & 0o777 for p in save.rglob("*") if p.is_file()}
    assert set(modes.values()) == {0o640}, modes


def test_a_checkpoint_says_what_it_was_made_with(run):
    config, engines, save = run
    saving.save(config, engines, state_after(2))
    found = read(save / "step_000002")
    assert found.config["num_rollout"] == 9
    assert found.made_with["trainer_ranks"] == 1 and found.made_with["torch"]


def test_a_checkpoint_that_cannot_fit_is_refused_with_the_sum(unstarted, monkeypatch, tmp_path):
    config, engines = unstarted
    config = changed(config, save=str(tmp_path))
    usage = shutil._ntuple_diskusage(2**30, 2**30 - 2**20, 2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    message = (
        r"takes 257,\d+ parameters x \(12 bytes .* \+ 4 of exported weights\) = 0.00 GiB, and 0.00"
    )
    with pytest.raises(ConfigError, match=message):
        saving.require_room(config, engines.hf_config)


def weight_bytes(directory):
    files = [p for p in directory.rglob("*") if p.suffix in (".distcp", ".safetensors")]
    return sum(file.stat().st_size for file in files)


@pytest.fixture
def of_adapters(checkpoint, tmp_path):
    """A run of adapters, and the bytes of its checkpoint's weights."""
    config, engines = make_run(checkpoint, tmp_path, lora_rank=64)
    saving.save(config, engines, state_after(2))
    return config, engines, weight_bytes(tmp_path / "save")


@pytest.mark.parametrize("what", ["a model", "adapters"])
def test_the_room_asked_for_is_what_a_checkpoint_takes(
    unstarted, saved, of_adapters, monkeypatch, what
):
    config, engines, size = of_adapters
    if what == "a model":
        (config, engines), size = unstarted, weight_bytes(saved / "step_000004")
    for free, fits in [(size, True), (0.95 * size, False)]:
        usage = shutil._ntuple_diskusage(2**30, 0, free)
        monkeypatch.setattr("shutil.disk_usage", lambda path, u=usage: u)
        asked = config, engines.hf_config, engines.contract.adapter
        if fits:
            saving.require_room(*asked)
        else:
            with pytest.raises(ConfigError, match="of adapters x" if what == "adapters" else ""):
                saving.require_room(*asked)


@pytest.mark.parametrize(
    ("backend", "dtype", "trained"),
    [
        ("fsdp", "bfloat16", 12),
        ("megatron", "bfloat16", 14),  # measured: 14.5 bytes per parameter, and 16.5
        ("megatron", "float32", 16),
    ],
)
def test_the_room_asked_for_is_that_of_the_training_engine(
    unstarted, monkeypatch, backend, dtype, trained
):
    config, engines = unstarted
    config = changed(
        config,
        train_backend=backend,
        dtype=dtype,
    )
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))
    with pytest.raises(ConfigError, match=rf"parameters x \({trained} bytes of training state"):
        saving.require_room(config, engines.hf_config)


def test_a_directory_that_was_removed_is_made_again_and_no_other_run_gets_in_meanwhile(run):
    config, engines, save = run
    refused = []

    def another_run(partial):
        with pytest.raises(ConfigError, match="is writing there"):
            lock_elsewhere(save)
        refused.append(True)

    shutil.rmtree(save, ignore_errors=True)
    saving.save(config, engines, state_after(2), another_run)
    assert refused and names(save) == ["step_000002"]


def lock_elsewhere(directory):
    """Lock it as another process would."""
    script = "import sys; from pathlib import Path; from onpolicy.outputs.lock import locked; "
    script += "locked(Path(sys.argv[1]), '--save').__enter__()"
    done = subprocess.run(
        [sys.executable, "-c", script, directory], capture_output=True, text=True, env=ENVIRONMENT
    )
    if done.returncode:
        raise ConfigError(done.stderr)


FREE = 200_000
"""Bytes. A checkpoint of the adapters takes 35,840, and one of the model more."""


@pytest.mark.usefixtures("one_process")
def test_a_disk_with_room_for_adapters_alone_is_large_enough_for_a_run_of_them(
    tmp_path, monkeypatch
):
    save = str(tmp_path / "save")
    whole = changed(make_base(tmp_path), num_rollout=1, save=save, save_interval=1)
    usage = shutil._ntuple_diskusage(2**30, 0, FREE)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"--save=.*: a checkpoint takes"):
        run_policy(whole)
    assert run_policy(changed(whole, lora_rank=4))[0].run_hash


METRIC = "eval/hard/avg@1"


def bests(save, values):
    """The rollouts done of the best, after each of the evaluations by their step."""
    output = OutputConfig(save=str(save), save_best_metric=METRIC)
    best, found = None, []
    for step, value in values.items():
        best = better(output, best, step, {METRIC: value, "eval/hard/response_length": 1.0})
        found.append(best and best.rollouts_done)
    return found


@pytest.fixture
def save(tmp_path):
    for step in (2, 4, 6, 8):
        (tmp_path / f"step_{step:06d}").mkdir()
    return tmp_path


@pytest.mark.usefixtures("one_process")
def test_the_best_is_the_first_of_the_largest_that_was_saved(save):
    values = {0: 9.0, 2: 0.5, 3: 0.9, 4: 0.5, 6: 0.75, 8: 0.25}
    assert bests(save, values) == [None, 2, 2, 2, 6, 6]
    assert os.readlink(save / "best") == "step_000006"


@pytest.mark.usefixtures("one_process")
def test_a_link_that_was_half_made_is_made_anew(save):
    (save / ".partial_best").symlink_to("step_000002")
    bests(save, {4: 1.0})
    assert os.readlink(save / "best") == "step_000004"


@pytest.mark.usefixtures("one_process")
def test_an_evaluation_without_the_metric_chooses_nothing_and_says_so(save, caplog):
    output = OutputConfig(save=str(save), save_best_metric="eval/hard/maj@4")
    best = Best(rollouts_done=2, value=0.5)
    assert better(output, best, 4, {"eval/easy/avg@4": 1.0}) == best
    assert not caplog.records
    assert better(output, best, 4, {"eval/hard/avg@4": 1.0}) == best
    assert "--save-best-metric=eval/hard/maj@4: step 4 has none" in caplog.text
    assert not (save / "best").is_symlink()


class Stopped(Exception):
    pass


@pytest.mark.usefixtures("one_process")
def test_the_best_outlives_newer_ones_and_a_run_that_goes_on_knows_it(tmp_path):
    is_first = True

    def reward(sample):
        if is_first and sample.weight_version == 3:
            raise Stopped
        return {1: 0.5, 2: 0.75}.get(sample.weight_version, 0.25)

    save = tmp_path / "save"
    values = {
        "eval_interval": 1, "save": str(save), "save_interval": 1, "keep_checkpoints": 1,
        "load": str(save), "save_best_metric": METRIC, "num_rollout": 4,
    }  # fmt: skip
    with pytest.raises(Stopped):
        run_in_memory(tmp_path, reward=reward, **values)
    assert os.readlink(save / "best") == "step_000002"
    is_first = False
    run_in_memory(tmp_path, reward=reward, **values)
    assert sorted(path.name for path in save.glob("step_*")) == ["step_000002", "step_000004"]
    assert os.readlink(save / "best") == "step_000002"
    assert read(save / "best").state.rollouts_done == 2
    assert read(save / "step_000004").state.best == Best(rollouts_done=2, value=0.75)
