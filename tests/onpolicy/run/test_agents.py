"""Whole runs whose prompts a function of the user's own rolls out."""

import json
import re
import shutil

import pytest

from onpolicy.errors import AgentError, ConfigError
from onpolicy.rollout.failures import OtherTokensError
from onpolicy.run.launch.inputs import make_rollouter
from onpolicy.run.run import Run
from tests.onpolicy.run.test_drawing import Clock, journal_of, steps_of
from tests.support.agents import ToldWatch
from tests.support.engines_in_memory import Host
from tests.support.run_in_memory import (
    PROMPTS,
    Interrupted,
    even_tokens,
    interrupted_at,
    make_config,
    records_of,
    run_in_memory,
    without_seconds,
)

pytestmark = pytest.mark.usefixtures("one_process")

MODES = {
    "lag 0": {},
    "lag 1": {"rollout_lag": 1},
    # What `acts` observes differs from run to run: groups are to tie by chance, not by what was learnt.
    "dynamic": {
        "dynamic_sampling": True,
        "over_sampling_batch_size": 2,
        "n_samples_per_prompt": 2,
        "lr": 0.1,
    },
}


@pytest.fixture(autouse=True)
def told_watch(monkeypatch):
    monkeypatch.setattr("onpolicy.rollout.open_episode.Stopwatch", ToldWatch)


def failed_of(directory):
    """What is written of attempts that failed, by file."""
    files = sorted((directory / "run" / "samples").glob("failed_*.jsonl"))
    return {
        file.name: [without_seconds(json.loads(line)) for line in file.read_text().splitlines()]
        for file in files
    }


def path_of(name):
    return f"tests.support.agents.{name}"


def run(directory, name, host=None, make_run=Run, **more):
    values = {"custom_generate_function_path": path_of(name), "rollout_max_response_len": 12}
    return run_in_memory(
        directory, host or Host(), even_tokens, make_run=make_run, **values, **more
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_episodes_that_branch_has_one_hash_whatever_engines_and_tools_take(tmp_path, mode):
    values = MODES[mode]
    ran = run(tmp_path / "one", "acts_by_tokens", **values)
    assert ran.totals.num_mismatched_tokens == 0 < ran.totals.num_compared_tokens
    dying = Host({9}, {14})
    more = run(tmp_path / "two", "acts_by_tokens", dying, rollout_num_engines=2, **values)
    assert more.run_hash == ran.run_hash and dying.num_restarts


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_was_killed_observes_again_what_it_had_and_has_the_same_hash(tmp_path, mode):
    """What came after its checkpoint too: that was written down before it was used."""
    save, journal = tmp_path / "save", tmp_path / "run" / "observations.jsonl"
    values = {"save": str(save), "load": str(save), "save_interval": 1, **MODES[mode]}
    ran = run(tmp_path, "acts", **values)
    for later in sorted(save.glob("step_*"))[1:]:
        shutil.rmtree(later)
    observed = journal.read_bytes()
    assert run(tmp_path, "acts", **values).run_hash == ran.run_hash
    assert journal.read_bytes() == observed
    assert run(tmp_path / "other", "acts", **MODES[mode]).run_hash != ran.run_hash


@pytest.mark.parametrize("seed", range(3))
def test_a_free_run_of_branches_is_repeated_from_its_journal_on_another_clock(tmp_path, seed):
    values = {
        "custom_generate_function_path": path_of("acts"), "rollout_max_response_len": 12,
        "max_staleness": 2,
    }  # fmt: skip
    ran = Clock(seed, engines=2).run(tmp_path / "ran", **values)
    journal = journal_of(tmp_path / "ran")
    assert any("branches" in group for line in steps_of(journal) for group in line["groups"])
    again = Clock(seed + 99).run(tmp_path / "again", replay=str(journal), **values)
    assert again.run_hash == ran.run_hash
    assert steps_of(journal_of(tmp_path / "again")) == steps_of(journal)


def free_values(name, **more):
    function = {"custom_generate_function_path": path_of(name), "rollout_max_response_len": 12}
    return {**function, "agent_workers": 0, "max_staleness": 2, "num_rollout": 2, **more}


@pytest.mark.parametrize("failures", ["retry", "drop"])
def test_what_the_clock_had_fail_in_a_free_run_fails_in_its_replay(tmp_path, monkeypatch, failures):
    values = free_values("acts_or_takes_long", episode_time_limit=0.1, episode_failures=failures)
    ran = Clock(1, engines=2).run(tmp_path / "ran", **values)
    journal = journal_of(tmp_path / "ran")
    failed = [record["rollout/num_failed_episodes"] for record in records_of(tmp_path / "ran")]
    assert sum(failed) > 0
    monkeypatch.setattr("tests.support.agents.is_held_up", False)
    for name in ("again", "and again"):  # the second repeats what the first one wrote
        again = Clock(9).run(tmp_path / name, replay=str(journal), **values)
        assert again.run_hash == ran.run_hash
        assert steps_of(journal_of(tmp_path / name)) == steps_of(journal)
        records = records_of(tmp_path / name)
        assert [record["rollout/num_failed_episodes"] for record in records] == failed
        journal = journal_of(tmp_path / name)


@pytest.mark.parametrize("mode", ["lag 0", "lag 1"])
def test_what_the_clock_had_fail_fails_again_in_a_run_that_was_killed(tmp_path, monkeypatch, mode):
    save = tmp_path / "save"
    values = {
        "save": str(save), "load": str(save), "save_interval": 1, "num_rollout": 2,
        "episode_time_limit": 0.1, "episode_failures": "retry", "eval_sets": {},
        "agent_workers": 0, **MODES[mode],
    }  # fmt: skip
    ran = run(tmp_path, "acts_or_takes_long", **values)
    failed = [record["rollout/num_failed_episodes"] for record in records_of(tmp_path)]
    written = failed_of(tmp_path)
    assert all(any(each["tokens"]["texts"] for each in lines) for lines in written.values())
    shutil.rmtree(save / "step_000002")
    monkeypatch.setattr("tests.support.agents.is_held_up", False)
    assert run(tmp_path, "acts_or_takes_long", **values).run_hash == ran.run_hash
    assert failed[1] > 0
    assert [record["rollout/num_failed_episodes"] for record in records_of(tmp_path)] == failed
    assert failed_of(tmp_path) == written  # what was said too, though no attempt was begun again


def test_a_replay_whose_agent_says_something_else_ends_and_names_the_episode(tmp_path, monkeypatch):
    values = free_values("forks_by")
    Clock(2).run(tmp_path / "ran", **values)
    monkeypatch.setattr("onpolicy.run.drawing.PATIENCE", 2.0)
    monkeypatch.setattr("tests.support.agents.hears", lambda index: f"other{index}")
    replay = str(journal_of(tmp_path / "ran"))
    with pytest.raises(OtherTokensError, match=r"^--replay.* prompt \d, sample \d: .*other\d"):
        Clock(3).run(tmp_path / "again", replay=replay, **values)


def test_a_replay_in_which_an_episode_fails_that_did_not_ends(tmp_path, monkeypatch):
    values = free_values("forks_by", episode_failures="drop")
    Clock(2).run(tmp_path / "ran", **values)
    monkeypatch.setattr("tests.support.agents.hears", None)
    replay = str(journal_of(tmp_path / "ran"))
    with pytest.raises(OtherTokensError, match=r"--replay: prompt \d, sample \d: .*it did not"):
        Clock(3).run(tmp_path / "again", replay=replay, **values)


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("raises", "raised", r"raised KeyError: 'no such tool' \(agents.py, line \d+\)"),
        ("never_ends", "deadline", "took more than --episode-time-limit=0.1 seconds"),
        ("exceeds", "context", "exceed --rollout-max-context-len=20"),
        ("samples_nothing", "result", "ended without anything sampled"),
        ("returns_text", "result", "returned 'done', and must return an Episode"),
    ],
)
def test_an_episode_that_fails_ends_the_run_and_says_why(tmp_path, name, reason, says):
    values = {"episode_time_limit": 0.1, "rollout_max_context_len": 20, "agent_workers": 0}
    with pytest.raises(AgentError, match=rf"--episode-failures=stop: prompt \d, .*{says}") as ended:
        run(tmp_path, name, **values)
    assert ended.value.reason == reason
    ((file, lines),) = failed_of(tmp_path).items()
    assert file == "failed_rollout_000000.jsonl"
    said = [each for each in lines if each["failed"] == reason and re.search(says, each["message"])]
    assert len(said) == len(lines)
    assert all(each["reward"] is None and each["tokens"]["texts"] for each in said) == (
        name != "samples_nothing"
    )


@pytest.mark.parametrize("name", ["raises", "never_ends", "exceeds"])
def test_episodes_that_fail_are_dropped_and_counted(tmp_path, name):
    values = {"episode_time_limit": 0.1, "rollout_max_context_len": 20, "agent_workers": 0}
    run(tmp_path, name, episode_failures="drop", eval_sets={"": PROMPTS[:1]}, **values)
    reason = {"raises": "raised", "never_ends": "deadline", "exceeds": "context"}[name]
    records = records_of(tmp_path)
    for record in records:
        failed = record["rollout/num_failed_episodes"]
        assert failed in (0, 4, 8) and failed == record.get(f"rollout/failed_episodes/{reason}", 0)
    assert sum(record["rollout/num_failed_episodes"] for record in records) > 0
    written = failed_of(tmp_path)
    assert {"eval" in file for file in written} == {False} and len(written) > 1
    for file, lines in written.items():
        (record,) = [each for each in records if file == f"failed_rollout_{each['step']:06d}.jsonl"]
        assert len(lines) == record["rollout/num_failed_episodes"]


def test_episodes_that_are_begun_anew_have_other_seeds_and_are_dropped_after_three(tmp_path):
    run(tmp_path, "raises", episode_failures="retry", eval_sets={"": PROMPTS[:1]})
    counts = {record["rollout/num_failed_episodes"] for record in records_of(tmp_path)}
    assert counts <= {0, 16, 32} and len(counts) > 1


def test_a_run_all_of_whose_episodes_fail_ends(tmp_path):
    with pytest.raises(AgentError, match=r"have failed \(the first \S+.*\)\. Mend"):
        run(tmp_path, "returns_text", episode_failures="drop", eval_sets={})


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("tests.support.nowhere.acts", "cannot be imported: ModuleNotFoundError"),
        (path_of("no_such_function"), "has no 'no_such_function'"),
        (path_of("is_no_coroutine"), "is not async"),
        (path_of("takes_one"), "too many positional arguments: it is called with two arguments"),
        (path_of("GIVEN"), "is a list, not a function"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_anything_starts(tmp_path, path, says):
    config = make_config(tmp_path, custom_generate_function_path=path)
    with pytest.raises(ConfigError, match=f"^--custom-generate-function-path={path}: .*{says}"):
        make_rollouter(config)


def test_an_evaluation_counts_the_attempts_that_failed_in_it(tmp_path):
    """Those at prompts of odd numbers."""
    run(tmp_path, "raises", episode_failures="drop", eval_interval=4)
    evaluated = [record for record in records_of(tmp_path) if "eval/avg@1" in record]
    assert evaluated and all(record["eval/num_failed_episodes"] > 0 for record in evaluated)
    for record in evaluated:
        lines = failed_of(tmp_path)[f"failed_eval_{record['step']:06d}.jsonl"]
        assert len(lines) == record["eval/num_failed_episodes"]
        assert all("no such tool" in each["message"] and each["response"] for each in lines)
    run(tmp_path / "other", "acts", eval_interval=4)
    evaluated = [record for record in records_of(tmp_path / "other") if "eval/avg@1" in record]
    assert evaluated and all(record["eval/num_failed_episodes"] == 0 for record in evaluated)


@pytest.mark.parametrize("mode", ["lag 0", "lag 1"])
def test_weights_of_tokens_reach_training_from_workers_and_through_checkpoints(tmp_path, mode):
    seen = []

    class Kept(Run):
        def train(self, groups, step):
            seen.extend(s for group in groups for s in group.samples)
            return super().train(groups, step)

    values = {"agent_workers": 1, "entropy_coef": 0.1, **MODES[mode]}
    straight = run(tmp_path / "straight", "weighs", make_run=Kept, **values)
    assert seen
    for sample in seen:
        others = [float(i % 2) for i in range(sample.trajectory.num_sampled)]
        expected = {"objective": others, "entropy": [1 - x for x in others]}
        assert sample.token_weights == expected
    saves = {"save": str(tmp_path / "save"), "load": str(tmp_path / "save"), "save_interval": 1}
    with pytest.raises(Interrupted):
        run(tmp_path / "part", "weighs", make_run=interrupted_at(2), **values, **saves)
    resumed = run(tmp_path / "part", "weighs", **values, **saves)
    assert resumed.run_hash == straight.run_hash


@pytest.mark.parametrize("mode", ["lag 0", "lag 1"])
def test_weights_that_a_reward_function_says_are_hashed_and_outlive_a_checkpoint(tmp_path, mode):
    def weighed(sample):
        weights = [float(i % 2) for i in range(sample.trajectory.num_sampled)]
        sample.token_weights = {"objective": weights}
        return even_tokens(sample)

    values = {"reward": weighed, **MODES[mode]}
    plain = run_in_memory(tmp_path / "plain", **MODES[mode])
    straight = run_in_memory(tmp_path / "straight", **values)
    assert straight.run_hash != plain.run_hash
    saves = {"save": str(tmp_path / "save"), "load": str(tmp_path / "save"), "save_interval": 1}
    with pytest.raises(Interrupted):
        run_in_memory(tmp_path / "part", make_run=interrupted_at(2), **values, **saves)
    resumed = run_in_memory(tmp_path / "part", **values, **saves)
    assert resumed.run_hash == straight.run_hash


FUNCTION = "tests/support/agent_functions.py:forks"


@pytest.mark.parametrize("mode", [{}, {"rollout_lag": 1}])
def test_a_run_has_the_same_hash_with_any_number_of_workers(tmp_path, mode):
    values = {"custom_generate_function_path": FUNCTION, "rollout_max_response_len": 9, **mode}
    ran = {
        workers: run_in_memory(tmp_path / str(workers), agent_workers=workers, **values)
        for workers in (0, 1, 2)
    }
    assert len({each.run_hash for each in ran.values()}) == 1
    assert all(each.totals.num_mismatched_tokens == 0 for each in ran.values())
