"""Which checkpoint a run goes on from, and what it may not go on with."""

import dataclasses
import json
import re
import shutil
from types import SimpleNamespace

import pytest

from onpolicy.config.groups.evaluation_flags import EvalSet
from onpolicy.errors import ConfigError
from onpolicy.run import saving
from onpolicy.run.saving.checkpoint import STATE, _digest, made_with
from onpolicy.run.saving.resume import _report_other_surroundings
from tests.support.unstarted_run import EVALUATIONS, PROMPTS, changed, make_config, state_after


def find(config, prompts=PROMPTS, evaluations=EVALUATIONS):
    return saving.find(config, prompts, evaluations)


def loads(config, path):
    return changed(config, load=str(path))


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_run_resumes_from_the_latest_of_a_directory(run):
    config, save = run
    found = find(config)
    assert (found.directory, found.state) == (save / "step_000004", state_after(4))
    assert found.config["hf_checkpoint"] == config.model.hf_checkpoint


@pytest.mark.parametrize("name", ["step_000002", "best"])
def test_a_run_resumes_from_one_checkpoint(run, tmp_path, name):
    config, save = run
    (save / "step_000002").rename(tmp_path / name)
    config = changed(config, load=str(tmp_path / name), save=str(tmp_path / "new"))
    assert find(config).state == state_after(2)


@pytest.mark.parametrize("missing", ["", "other"])
def test_a_directory_without_a_checkpoint_is_an_error(run, tmp_path, missing):
    config, _ = run
    (tmp_path / "other").mkdir()
    config = loads(config, tmp_path / (missing or "typo"))
    rule = "holds no checkpoint" if missing else "no such directory"
    with pytest.raises(ConfigError, match=rf"^--load=.*: {rule}\. Give a directory of checkp"):
        find(config)


def test_a_run_that_is_simply_started_again_starts_from_scratch_the_first_time(
    checkpoint, tmp_path, caplog
):
    config = make_config(checkpoint, tmp_path)
    with caplog.at_level("INFO"):
        assert find(config) is None
        assert find(loads(config, f"{tmp_path}/x/../save/")) is None
    assert caplog.text.count("no checkpoint there yet, so the run starts from scratch") == 2


def test_a_run_without_load_starts_from_scratch_unless_it_would_replace_another(run, tmp_path):
    config, _ = run
    with pytest.raises(
        ConfigError, match=r"--save=.*: holds checkpoints of another run \(up to st"
    ):
        find(loads(config, ""))
    assert find(changed(config, load="", save=str(tmp_path / "new"))) is None


def damage_one_file(step):
    flip_a_bit(step / "sharded" / "__0_0.distcp")
    return r"sharded/__0_0.distcp: not the bytes that were written"


def empty_it(step):
    shutil.rmtree(step)
    step.mkdir()
    return "state.json: missing"


@pytest.mark.parametrize("damage", [damage_one_file, empty_it])
def test_a_damaged_checkpoint_is_refused_and_the_newest_whole_one_named(run, damage):
    config, save = run
    shutil.copytree(save / "step_000004", save / "step_000006")
    flip_a_bit(save / "step_000004" / "numbers.json")
    problem = damage(save / "step_000006")
    with pytest.raises(ConfigError) as refused:
        find(config)
    message = str(refused.value)
    assert re.match(rf"--load=.*step_000006: {problem}", message)
    assert message.endswith(f"resume from that with --load {save}/step_000002.")


def test_without_a_whole_one_before_it_that_is_said(run):
    config, save = run
    empty_it(save / "step_000004")
    shutil.rmtree(save / "step_000002")
    with pytest.raises(ConfigError, match=r"There is no whole one before it: start the run again"):
        find(config)


def test_after_a_damaged_checkpoint_the_run_goes_on_from_an_earlier_one(run, caplog):
    config, save = run
    empty_it(save / "step_000004")
    assert find(loads(config, save / "step_000002")).state == state_after(2)
    assert "step_000004 is damaged; it is set aside when the run comes to it" in caplog.text


def test_a_whole_later_checkpoint_is_not_replaced(run, tmp_path):
    config, save = run
    earlier = loads(config, save / "step_000002")
    with pytest.raises(
        ConfigError, match=r"holds step_000004, which is later than --load=.*step_00"
    ):
        find(earlier)
    assert find(changed(earlier, save=str(tmp_path / "new"))).state == state_after(2)


def test_a_run_does_not_write_among_the_checkpoints_of_another(run, tmp_path):
    config, save = run
    shutil.copytree(save, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"--save=.*other: holds checkpoints of another run"):
        find(changed(config, save=str(tmp_path / "other")))


REFUSED = {
    "num_rollout": 8, "rollout_stop_token_ids": (5,), "true_on_policy_mode": False,
    "sglang_args": ("--page-size", "1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_decides_results_may_not_change_unless_it_is_named(run, name, caplog):
    config = changed(run[0], **{name: REFUSED[name]})
    flag = name.replace("_", "-")
    message = (
        rf"^--load=.*step_000004: was made under .*\n  --{flag}=.*, was .*\n.*-settings {name}$"
    )
    with pytest.raises(ConfigError, match=message):
        find(config)
    allowed = changed(config, allow_changed_settings=("lr", name))
    assert find(allowed).state == state_after(4)
    assert f"goes on under a changed setting: --{flag}=" in caplog.text


def test_all_changes_are_named_at_once_with_old_and_new_value(run):
    config = changed(run[0], lr=0.5, seed=3, rollout_temperature=0.7, run_dir="/x")
    with pytest.raises(ConfigError) as refused:
        find(config)
    lines = str(refused.value).split("\n")
    assert lines[1:-1] == [
        "  --rollout-temperature=0.7, was 1.0", "  --lr=0.5, was 1e-06", "  --seed=3, was 0",
    ]  # fmt: skip
    assert lines[-1].endswith("--allow-changed-settings rollout_temperature lr seed")


def rewritten(save, change):
    """The latest checkpoint as another version of the code would have written it."""
    file = save / "step_000004" / STATE
    record = json.loads(file.read_text())
    change(record)
    record.pop("digest")
    file.write_text(json.dumps({**record, "digest": _digest(record)}))


def test_a_flag_that_the_record_lacks_meant_its_default(run):
    config, save = run
    rewritten(save, lambda record: record["config"].pop("lr"))
    assert find(config)
    with pytest.raises(ConfigError, match=r"--lr=0.1, was 1e-06"):
        find(changed(config, lr=0.1))


@pytest.mark.parametrize(
    ("before", "now", "loads_it"), [(2, 1, False), (1, 2, False), (2, 4, True)]
)
def test_whether_ranks_share_experts_may_not_change(run, before, now, loads_it):
    config, save = run
    rewritten(save, lambda record: record["config"].update(megatron_ep=before))
    config = changed(config, megatron_ep=now, allow_changed_settings=("megatron_ep",))
    if loads_it:
        assert find(config)
        return
    with pytest.raises(ConfigError, match=rf"--megatron-ep={now}: .*with --megatron-ep {before},"):
        find(config)


def test_what_else_is_another_than_before_is_logged(run, caplog):
    config, save = run
    rewritten(save, lambda record: record["config"].update(old_flag=1))
    rewritten(save, lambda record: record["made_with"].update(torch="1.0", trainer_ranks=2))
    assert find(config)
    assert "was made with a setting that is gone: old_flag" in caplog.text
    assert re.search(r"was made with torch=1.0, now 2", caplog.text)
    assert "was made with trainer_ranks=2, now 1" in caplog.text


@pytest.mark.parametrize(
    "other", [{"prompt_ids": [4]}, {"label": "y"}, {"text": "b"}, {"metadata": {"level": 2}}]
)
def test_other_prompts_are_refused_unless_that_is_allowed(run, other):
    config, _ = run
    prompts = [dataclasses.replace(PROMPTS[0], **other), *PROMPTS[1:]]
    with pytest.raises(ConfigError, match=r"--prompt-data=.*: its prompts are others than when"):
        find(config, prompts)
    allowed = changed(config, allow_changed_settings=("prompt_data",))
    assert find(allowed, prompts).state == state_after(4)


def test_the_same_prompts_at_another_place_are_the_same_settings(run, caplog):
    config, _ = run
    moved = changed(config, prompt_data=("/mnt/other/prompts.jsonl",))
    assert find(moved).state == state_after(4)
    assert "changed setting" not in caplog.text


OTHER_SETS = {
    "other prompts": {"aime": ("8 samples", PROMPTS[1:])},
    "other sampling": {"aime": ("16 samples", PROMPTS[:2])},
    "another name": {"math": ("8 samples", PROMPTS[:2])},
    "one more": {"aime": ("8 samples", PROMPTS[:2]), "math": ("8 samples", PROMPTS[:2])},
    "none": {},
}


@pytest.mark.parametrize("other", OTHER_SETS)
def test_other_evaluation_sets_are_refused_by_name_unless_that_is_allowed(run, other, caplog):
    config, _ = run
    sets = saving.digest_sets(OTHER_SETS[other])
    names = {"another name": "aime, math", "one more": "math"}.get(other, "aime")
    rule = rf"--eval-prompt-data, --eval-config: other evaluation sets than when .* \({names}\)"
    with pytest.raises(ConfigError, match=rule):
        find(config, evaluations=sets)
    allowed = changed(config, allow_changed_settings=("eval_prompt_data",))
    assert find(allowed, evaluations=sets).state == state_after(4)
    assert f"goes on with other evaluation sets: {names}" in caplog.text


def test_the_same_evaluation_sets_at_another_place_are_the_same_settings(run, caplog):
    config, _ = run
    moved = changed(config, eval_prompt_data=("aime", "/mnt/other/aime.jsonl"))
    assert find(moved).state == state_after(4)
    assert "changed setting" not in caplog.text


def test_a_measure_is_of_all_of_a_set_but_where_it_lies_and_when_it_is_due():
    made = {
        "name": "aime", "path": "a.jsonl", "interval": 4, "n_samples_per_eval_prompt": 8,
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_response_len": 9, "input_key": "prompt",
        "label_key": "label",
    }  # fmt: skip
    one = EvalSet(**made).measure
    assert EvalSet(**{**made, "path": "/b.jsonl", "interval": 2, "flag": "x"}).measure == one
    for name, value in [("temperature", 0.5), ("rm_type", "math"), ("max_response_len", 8)]:
        assert EvalSet(**{**made, name: value}).measure != one


def test_a_reward_function_that_was_changed_is_said(checkpoint, tmp_path, caplog):
    file = tmp_path / "own.py"
    file.write_text("def reward(sample): return 1.0")
    config = changed(make_config(checkpoint, tmp_path), rm_type="", custom_rm_path=f"{file}:reward")
    before = made_with(config)
    assert made_with(config) == before
    file.write_text("def reward(sample): return 0.0")
    assert made_with(config) != before
    found = SimpleNamespace(directory="step_000002", made_with=before)
    _report_other_surroundings(found, config)
    assert f"step_000002 was made with custom_rm_path={file}:reward xxh3_128:" in caplog.text
    caplog.clear()
    _report_other_surroundings(SimpleNamespace(directory="x", made_with=made_with(config)), config)
    assert not caplog.text
