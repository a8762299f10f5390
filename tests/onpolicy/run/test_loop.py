"""The loop and its verbs: whole runs on engines in memory; tests/e2e runs real ones."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import numpy as np
import pytest

from onpolicy.config.groups import OutputConfig
from onpolicy.errors import EngineError, HostLostError, ParityError, TrainerLostError
from onpolicy.outputs.totals import RunHash
from onpolicy.run.cases import read_case
from onpolicy.run.engines import EnginePair
from onpolicy.run.run import Run
from onpolicy.run.saving.checkpoint import checkpoints
from onpolicy.types import SampleGroup
from tests.support.engines_in_memory import Host
from tests.support.run_in_memory import (
    EVAL_SETS,
    GOVERNED,
    PROMPTS,
    ROLLOUTS,
    even_tokens,
    records_of,
    run_in_memory,
    samples_of,
)
from tests.support.tiny_policy import ALIGNED, STOCK, log_probs_of, make_weights
from tests.support.trainer_in_memory import TrainerInMemory
from tests.support.weight_digests import digest_of

pytestmark = pytest.mark.usefixtures("one_process")

PER_ROLLOUT = 3 * 4
"""Samples: prompts times samples of each."""


class Samples(list):
    """A reward that keeps the samples it is asked for, in their order."""

    def __call__(self, sample):
        self.append(sample)
        return even_tokens(sample)

    def of(self, step):
        return self[step * PER_ROLLOUT : (step + 1) * PER_ROLLOUT]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run with nothing special: its directory, its summary, its samples."""
    directory, samples = tmp_path_factory.mktemp("plain"), Samples()
    return directory, run_in_memory(directory, reward=samples), samples


def test_every_rollout_is_sampled_trained_on_and_followed_by_a_push(tmp_path, monkeypatch):
    done = []

    def noting(owner, name, what):
        method = getattr(owner, name)

        def noted(self, *args, **kwargs):
            done.append(what(*args))
            return method(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    noting(EnginePair, "push_weights", lambda version: f"push {version}")
    noting(EnginePair, "work", lambda job, *_: "sample")
    noting(TrainerInMemory, "train", lambda samples, step, rates: f"train {step}")
    host = Host()
    run_in_memory(tmp_path, host, eval_sets={}, eval_interval=0)
    assert host.answered.total() == ROLLOUTS * PER_ROLLOUT
    assert done == [
        "push 0",
        *(
            what
            for step in range(ROLLOUTS)
            for what in ("sample", f"train {step}", f"push {step + 1}")
        ),
    ]


def test_samples_come_from_the_weights_of_all_rollouts_before_the_first_from_the_checkpoints(plain):
    samples = plain[2]
    assert len(samples) == ROLLOUTS * PER_ROLLOUT
    for s in samples.of(0):
        scores = log_probs_of(make_weights(), s.prompt.prompt_ids, s.response_ids, 1.0)
        assert s.rollout_log_probs == scores.tolist()
    for step in range(ROLLOUTS):
        assert {sample.weight_version for sample in samples.of(step)} == {step}


def test_a_rollouts_metrics_are_those_of_its_samples_and_of_the_training_on_them(plain):
    directory, _, samples = plain
    records = records_of(directory)
    assert [record["step"] for record in records] == list(range(ROLLOUTS))
    for step, record in enumerate(records):
        ours = samples.of(step)
        assert record["rollout/raw_reward"] == fmean(sample.reward for sample in ours)
        lengths = [len(sample.response_ids) for sample in ours]
        assert record["rollout/response_length"] == fmean(lengths)
        assert record["parity/num_compared_tokens"] == sum(lengths)
        assert record["parity/num_mismatched_tokens"] == record["rollout/num_filtered_groups"] == 0
        assert math.isfinite(record["train/loss"]) and record["train/lr"] == 0.5


def test_totals_are_sums_over_rollouts_and_their_first_and_last_rewards(plain):
    directory, summary, _ = plain
    records = records_of(directory)
    compared = sum(record["parity/num_compared_tokens"] for record in records)
    assert dataclasses.asdict(summary.totals) == {
        "first_reward": records[0]["rollout/raw_reward"],
        "last_reward": records[-1]["rollout/raw_reward"], "num_compared_tokens": compared,
        "num_mismatched_tokens": 0, "num_unscored": 0, "num_repeats": 0,
    }  # fmt: skip
    assert summary.rollouts == ROLLOUTS


def test_the_run_hash_is_a_chain_of_samples_rewards_losses_and_weights(tmp_path):
    samples, digests = Samples(), []

    class Digesting(Run):
        def push_weights(self):
            metrics = super().push_weights()
            digests.append(digest_of(self.engines.trainer.weights))
            return metrics

    summary = run_in_memory(tmp_path, reward=samples, make_run=Digesting)
    expected = RunHash()
    for step, record in enumerate(records_of(tmp_path)):
        group = SampleGroup(prompt=PROMPTS[0], samples=samples.of(step))
        expected.add_step([group], record["train/loss"], digests[step + 1])
    assert summary.run_hash == expected.value
    assert len(set(digests)) == len(digests)  # it learns


WITHOUT_EFFECT = [
    {"rollout_num_engines": 3},
    {"rollout_max_concurrency": 1},
    {"weight_sync": "tensor"},
    {"eval_interval": 1},
    {"log_samples": 0},
    {"save": "SAVE", "save_interval": 1, "keep_checkpoints": 1},
]


@pytest.mark.parametrize("values", WITHOUT_EFFECT, ids=lambda values: next(iter(values)))
def test_a_setting_that_decides_no_result_changes_no_bit(plain, tmp_path, values):
    values = {k: str(tmp_path / "save") if v == "SAVE" else v for k, v in values.items()}
    summary = run_in_memory(tmp_path, **values)
    assert (summary.run_hash, summary.totals) == (plain[1].run_hash, plain[1].totals)


@pytest.mark.parametrize("values", [{"seed": 1}, {"lr": 0.25}, {"advantage_estimator": "rloo"}])
def test_a_setting_that_decides_results_changes_the_hash(plain, tmp_path, values):
    assert run_in_memory(tmp_path, **values).run_hash != plain[1].run_hash


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_evaluation_comes_before_the_first_and_after_each_kth_rollout_and_changes_no_sample(
    plain, tmp_path, interval
):
    run_in_memory(tmp_path, eval_interval=interval)
    records = records_of(tmp_path)
    evaluated = [record["step"] for record in records if "eval/avg@1" in record]
    assert evaluated == list(range(0, ROLLOUTS + 1, interval))
    assert evaluated == [record["step"] for record in records if "eval/hard/avg@1" in record]
    assert [r for r in records if "rollout/raw_reward" in r] == records_of(plain[0])
    for step in evaluated:
        assert {line["step"] for line in samples_of(tmp_path, f"eval_hard_{step:06d}")} == {step}


SETS = """
eval:
  datasets:
    - {name: easy, path: a, interval: 2, n_samples_per_eval_prompt: 2, max_response_len: 2, top_p: 0.5}
    - {name: hard, path: b, interval: 3, temperature: 0.5, top_p: 0.5, top_k: 2}
"""


def test_every_set_has_its_own_interval_samples_and_sampling(plain, tmp_path, monkeypatch):
    (tmp_path / "sets.yaml").write_text(SETS)
    given = {"eval_config": str(tmp_path / "sets.yaml"), "log_samples": 99}
    asked, work = set(), EnginePair.work

    def noting(self, job, *more):
        completions = work(self, job, *more)
        params = [request.params for request in job.requests]
        asked.update((p.temperature, p.top_p, p.top_k, p.max_new_tokens) for p in params)
        return completions

    monkeypatch.setattr(EnginePair, "work", noting)
    sets = {"easy": PROMPTS[:2], "hard": PROMPTS[3:]}
    summary = run_in_memory(tmp_path, eval_sets=sets, **given)
    assert summary.run_hash == plain[1].run_hash
    records = records_of(tmp_path)
    assert [r["step"] for r in records if "eval/easy/pass@2" in r] == [0, 2, 4]
    assert [r["step"] for r in records if "eval/hard/pass@1" in r] == [0, 3]
    easy, hard = (samples_of(tmp_path, f"eval_{name}_000000") for name in ("easy", "hard"))
    assert len(easy) == 4 and len(hard) == 2
    assert max(line["num_tokens"] for line in easy) == 2 < max(line["num_tokens"] for line in hard)
    assert (1.0, 0.5, -1, 2) in asked
    assert (0.5, 0.5, 2, 6) in asked
    assert len(asked) == 3  # and what rollouts are


def test_another_evaluation_set_beside_it_changes_nothing_of_one(tmp_path):
    alone, both = tmp_path / "alone", tmp_path / "both"
    run_in_memory(alone, eval_interval=2, eval_sets={"hard": EVAL_SETS["hard"]})
    run_in_memory(both, eval_interval=2)
    for step in (0, 2, 4):
        name = f"eval_hard_{step:06d}"
        assert samples_of(alone, name) == samples_of(both, name)


def test_groups_of_equal_rewards_are_left_out_where_that_is_asked_for(tmp_path):
    class Half(Samples):
        def __call__(self, sample):
            reward = super().__call__(sample)
            return reward if sample.prompt.index % 2 else 0.25

    every, kept = Half(), Half()
    run_in_memory(tmp_path / "every", reward=every)
    run_in_memory(tmp_path / "kept", reward=kept, filter_equal_rewards=True)
    for directory, samples, filters in (("every", every, False), ("kept", kept, True)):
        for step, record in enumerate(records_of(tmp_path / directory)):
            trained = [s for s in samples.of(step) if s.prompt.index % 2 or not filters]
            num_left_out = (PER_ROLLOUT - len(trained)) / 4
            assert record["rollout/num_filtered_groups"] == num_left_out
            lengths = [len(sample.response_ids) for sample in trained]
            assert record["parity/num_compared_tokens"] == sum(lengths)


def test_a_rollout_of_equal_rewards_alone_is_not_trained_on_but_counts(
    tmp_path, caplog, monkeypatch
):
    asked_for_room = []
    monkeypatch.setattr(EnginePair, "make_room", lambda self: asked_for_room.append(self))
    values = {"filter_equal_rewards": True, "save": str(tmp_path / "save"), "save_interval": 4}
    summary = run_in_memory(tmp_path, reward=lambda sample: 1.0, **values)
    records = records_of(tmp_path)
    assert [record["rollout/num_filtered_groups"] for record in records] == [3.0] * ROLLOUTS
    assert not any("train/loss" in record for record in records)
    assert summary.rollouts == ROLLOUTS and summary.totals.num_compared_tokens == 0
    assert "rollout 3: all groups have equal rewards" in caplog.text
    assert len(asked_for_room) == 2  # at the start, and for the checkpoint: never to train
    assert sorted(file.name for file in (tmp_path / "save").glob("step_*")) == ["step_000004"]


class Interrupted(Exception):
    pass


def interrupted_at(step):
    """A reward that ends the run while it scores that rollout."""

    class Ends(Samples):
        def __call__(self, sample):
            if len(self) == step * PER_ROLLOUT + 5:
                raise Interrupted
            return super().__call__(sample)

    return Ends()


CLIMBING = {**GOVERNED, "num_rollout": 6}


@pytest.mark.parametrize(
    "mode", [{"lr_decay_style": "linear"}, CLIMBING], ids=["decaying", "governed"]
)
@pytest.mark.parametrize(("step", "save_interval"), [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)])
def test_a_resumed_run_goes_on_to_the_same_bits(tmp_path, mode, step, save_interval):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    save = str(broken / "save")
    values = {**mode, "save": save, "load": save, "save_interval": save_interval}
    with pytest.raises(Interrupted):
        run_in_memory(broken, reward=interrupted_at(step), **values)
    samples = Samples()
    resumed = run_in_memory(broken, reward=samples, **values)
    straight = run_in_memory(whole, **mode)
    assert dataclasses.replace(resumed, run_dir="") == dataclasses.replace(straight, run_dir="")
    assert records_of(broken) == records_of(whole)
    first = step // save_interval * save_interval
    assert len(samples) == (straight.rollouts - first) * PER_ROLLOUT
    assert {sample.weight_version for sample in samples.of(0)} == {first}


class LosesParts(Run):
    """Loses a rank of its trainer, or a host in an odd step, before it trains on the rollouts of `lost`,
    once for each."""

    lost: ClassVar[list[int]] = []

    def train(self, groups, step):
        if step in self.lost:
            self.lost.remove(step)
            raise (HostLostError if step % 2 else TrainerLostError)("a part of the run ended")
        return super().train(groups, step)


def test_a_rank_that_is_lost_while_a_checkpoint_is_written_costs_no_bit(
    tmp_path, plain, monkeypatch
):
    save, calls = TrainerInMemory.save, []

    def lost_the_second_time(self, directory):
        save(self, directory)
        calls.append(directory)
        if len(calls) == 2:
            raise TrainerLostError("rank 1 of the trainer ended")

    monkeypatch.setattr(TrainerInMemory, "save", lost_the_second_time)
    saves = {"save": str(tmp_path / "save"), "save_interval": 1}
    summary = run_in_memory(tmp_path, make_run=Run, **saves, max_rank_restarts=1)
    assert summary.run_hash == plain[1].run_hash
    assert len(calls) == ROLLOUTS + 1
    assert not [file.name for file in (tmp_path / "save").iterdir() if "partial" in file.name]


@pytest.mark.parametrize("mode", [{}, CLIMBING], ids=["aligned", "governed"])
@pytest.mark.parametrize(("lost", "save_interval"), [([0], 1), ([2], 2), ([1, 3, 3], 1)])
def test_a_run_that_loses_ranks_and_hosts_goes_on_to_the_same_bits(
    tmp_path, caplog, mode, lost, save_interval
):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    saves = {"save": str(broken / "save"), "save_interval": save_interval}
    LosesParts.lost = list(lost)
    struck = run_in_memory(
        broken, make_run=LosesParts, **mode, **saves, max_rank_restarts=len(lost)
    )
    straight = run_in_memory(whole, **mode)
    assert dataclasses.replace(struck, run_dir="") == dataclasses.replace(straight, run_dir="")
    assert records_of(broken) == records_of(whole)
    assert caplog.text.count("a part of the run ended") == len(lost)


def test_a_run_that_loses_more_than_it_may_ends(tmp_path):
    LosesParts.lost = [1, 1]
    saves = {"save": str(tmp_path / "save"), "save_interval": 1}
    with pytest.raises(HostLostError):
        run_in_memory(tmp_path, make_run=LosesParts, **saves, max_rank_restarts=1)


def test_samples_are_written_though_training_on_them_fails(tmp_path):
    """And what the parity check found of each is in them."""

    class OneBitOff(Samples):
        def __call__(self, sample):
            if len(self) == 2 * PER_ROLLOUT + 1:
                values = sample.trajectory.rollout_log_probs.array
                values[1] = np.nextafter(values[1], np.float32(0.0))
            return super().__call__(sample)

    samples = OneBitOff()
    with pytest.raises(ParityError, match=r"^1 of \d+ tokens"):
        run_in_memory(tmp_path, reward=samples)
    lines = samples_of(tmp_path, "rollout_000002")
    assert [line["num_tokens"] for line in lines] == [len(s.response_ids) for s in samples.of(2)]
    assert [line["mismatched_tokens"] for line in lines] == [0, 1, *[0] * (PER_ROLLOUT - 2)]
    assert [record["step"] for record in records_of(tmp_path)] == [0, 1]
    # What `onpolicy explain --case` reads: the sample, and the request that it answers.
    case = read_case(Path(OutputConfig(run_dir=str(tmp_path / "run")).case_file(2)))
    sample = samples.of(2)[1]
    assert case.trajectory == sample.trajectory
    pairs = zip(sample.rollout_log_probs, case.train_log_probs, strict=True)
    differ = [rollout != train for rollout, train in pairs]
    assert differ == [False, True, *[False] * (len(differ) - 2)]
    assert case.trajectory.weight_version == 2


TAKE_LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


@pytest.mark.parametrize("ends_with", [Interrupted, EngineError])
def test_whatever_ends_a_run_its_engines_end_and_its_directory_is_free(tmp_path, ends_with):
    by_engine = ends_with is EngineError
    host = Host(range(20, 999)) if by_engine else Host()
    reward = even_tokens if by_engine else interrupted_at(1)
    with pytest.raises(ends_with) as ended:
        run_in_memory(tmp_path, host, reward)
    assert host.engines and not any(engine.is_running for engine in host.engines)
    lock = tmp_path / "run" / ".lock"  # of a process: another one must get it
    assert subprocess.run([sys.executable, "-c", TAKE_LOCK, lock]).returncode == 0
    del ended  # which keeps the run, and so its files, up to here


def test_a_move_of_the_governor_changes_what_both_engines_run_on(tmp_path):
    samples, host = Samples(), Host()
    run_in_memory(tmp_path, host, samples, **CLIMBING)
    lines = (tmp_path / "run" / "governor.jsonl").read_text().splitlines()
    moves = [json.loads(line) for line in lines]
    assert [(move["step"], move["from"], move["to"]) for move in moves] == [
        (0, "stock", "tis"), (1, "tis", "mis"), (2, "mis", "decay"), (3, "decay", "aligned"),
    ]  # fmt: skip
    records = records_of(tmp_path)
    assert [record["governor/rung"] for record in records] == [1, 2, 3, 4, 4, 4]
    assert [record["train/lr"] for record in records] == [0.5, 0.5, 0.5, 0.25, 0.5, 0.5]
    mismatched = [record["parity/num_mismatched_tokens"] for record in records]
    assert min(mismatched[:4]) > 0 and mismatched[4:] == [0, 0]
    stock, aligned = host.engines
    assert (stock.spec.contract, aligned.spec.contract) == (STOCK, ALIGNED)
    assert [{s.weight_version for s in samples.of(step)} for step in (3, 4)] == [{3}, {4}]


def test_corrections_of_a_rung_are_the_trainers_from_the_next_rollout_on(tmp_path):
    seen = []

    class Seeing(Run):
        def train(self, groups, step):
            fallback = self.engines.trainer.fallback
            seen.append((fallback.use_tis, fallback.use_rs))
            return super().train(groups, step)

    run_in_memory(tmp_path, make_run=Seeing, **CLIMBING)
    assert seen == [(False, False), (True, False), *[(True, True)] * 4]


def test_a_run_that_is_ended_says_from_which_checkpoint_it_goes_on(tmp_path, caplog):
    def end(sample):
        if len(checkpoints(tmp_path / "save")) == 1:
            raise KeyboardInterrupt
        return even_tokens(sample)

    save = str(tmp_path / "save")
    with pytest.raises(KeyboardInterrupt):
        run_in_memory(tmp_path, reward=end, save=save, save_interval=1)
    assert f"--load {save} goes on from step_000001" in caplog.text
