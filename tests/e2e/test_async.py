"""Runs whose engines sample ahead of the trainer, on real servers: the schedule decides every bit."""

import re

import pytest

from onpolicy.outputs.meanings import meaning
from onpolicy.run.probe import PROMPTS
from tests.support.raylets import raylets
from tests.support.train_runs import (
    FREE,
    ROLLOUTS,
    a_rank_is_lost,
    finish,
    journal_of,
    kill_an_engine,
    metrics_of,
    run_hash,
    steps_of,
    wait_for,
)

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.runs]

MODES = {
    "lag 1": ("--rollout-lag", "1", "--global-batch-size", "16"),  # one step
    "lag 2, dynamic sampling": (
        "--rollout-lag", "2", "--dynamic-sampling", "--custom-rm-path", "own_reward.begins_even",
        "--rollout-max-response-len", "60",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(start, tmp_path_factory):
    """An undisturbed run of a mode with one engine: its directory and its hash."""
    runs = {}

    def of(mode):
        if mode not in runs:
            directory = tmp_path_factory.mktemp("plain")
            runs[mode] = directory, run_hash(finish(start(directory, *MODES[mode])))
        return runs[mode]

    return of


@pytest.mark.parametrize("mode", MODES)
def test_every_push_is_probed_and_no_token_of_these_weights_differs(plain, mode):
    records = metrics_of(plain(mode)[0])
    assert [record["step"] for record in records] == list(range(ROLLOUTS))
    for record in records:
        assert record["probe/num_compared_tokens"] > 20
        assert record["probe/num_mismatched_tokens"] == record["probe/k3"] == 0
        assert record["parity/num_mismatched_tokens"] == 0
        assert all(meaning(name) for name in record if name.startswith(("lag/", "probe/")))
    assert records[0].get("lag/mean", 0) == 0  # the first is of the checkpoint's weights
    for record in records[1:]:
        lag = min(record["step"], int(MODES[mode][1]))
        assert record["lag/mean"] >= lag
        assert record[f"lag/{lag}/k3"] > 0 and 0 < record[f"lag/{lag}/ess"] < 1
        if mode == "lag 1":  # learnt from by bypass
            assert "correction/weight_mean" not in record and record["train/ppo_kl"] != 0
        else:
            assert record["correction/weight_mean"] != 1  # weighed


def sequences_since_the_push(log):
    """How many an engine has begun: the probe's first."""
    text = log.read_text().rpartition("POST /flush_cache")[2]
    return sum(map(int, re.findall(r"Prefill batch, #new-seq: (\d+)", text)))


def kill_an_engine_that_samples_ahead(directory, process, engines):
    """The last of them."""
    log = directory / "run" / "logs" / f"engine_{engines - 1}.log"
    wait_for(lambda: sequences_since_the_push(log) > PROMPTS or process.poll() is not None)
    assert process.poll() is None, process.stdout.read()[-3000:]
    kill_an_engine(process)


def test_an_engine_that_is_killed_while_it_samples_ahead_costs_no_bit(start, plain, tmp_path):
    """The only one: whose samples another may take over, it loses below."""
    mode = "lag 2, dynamic sampling"
    process = start(tmp_path, *MODES[mode])
    wait_for(lambda: metrics_of(tmp_path) or process.poll() is not None)
    kill_an_engine_that_samples_ahead(tmp_path, process, 1)
    output = finish(process)
    assert "starting http://127.0.0.1" in output
    assert run_hash(output) == plain(mode)[1]


def test_what_was_drawn_without_a_signal_is_drawn_anew(plain):
    records = metrics_of(plain("lag 2, dynamic sampling")[0])
    assert sum(record["rollout/num_resampled_groups"] for record in records) > 0
    assert [record.get("lag/mean", 0) for record in records] == [0, 1, 2, 2]


def test_a_run_ahead_that_loses_an_engine_and_a_rank_and_is_killed_resumes_to_the_same_bits(
    start, plain, tmp_path
):
    """On one engine, where it had two; it trains on what it had drawn."""
    mode, save = "lag 1", tmp_path / "save"

    def under_way(process):
        kill_an_engine_that_samples_ahead(tmp_path, process, 2)

    argv = [*MODES[mode], "--rollout-num-engines", "2"]
    process = a_rank_is_lost(start, tmp_path, *argv, under_way=under_way)
    wait_for(lambda: (save / "step_000003").is_dir() or process.poll() is not None)
    process.kill()
    lost, _ = process.communicate(timeout=400)
    assert "starting http://127.0.0.1" in lost
    assert "the run begins from the last checkpoint" in lost
    saves = ("--save", str(save), "--save-interval", "1", "--load", str(save))
    output = finish(start(tmp_path, *MODES[mode], *saves))
    assert "resumed from" in output
    assert run_hash(output) == plain(mode)[1]


WITHIN = (
    *FREE, "--custom-generate-function-path", "own_agent.write_within",
    "--rollout-max-context-len", "160", "--rollout-max-concurrency", "4",
)  # fmt: skip

SHORTEST = 16 * 4 + 2
"""Tokens of the first answer of `write_within`, which its grammar allows to end no earlier."""


def test_a_free_run_that_is_interrupted_killed_and_resumed_is_repeated_to_the_bit(start, tmp_path):
    """Answers go on in their grammars with other weights. Two hosts repeat it, each with an engine and a
    rank."""
    ran, again, save = tmp_path / "ran", tmp_path / "again", tmp_path / "save"
    argv = [*WITHIN, "--save", str(save), "--save-interval", "1", "--load", str(save)]
    process = start(ran, *argv)
    wait_for(lambda: (save / "step_000002").is_dir() or process.poll() is not None)
    process.kill()
    process.wait()
    wanted = run_hash(finish(start(ran, *argv)))
    steps = steps_of(journal_of(ran))
    spans = [s["spans"] for step in steps for group in step["groups"] for s in group["samples"]]
    assert len(steps) == ROLLOUTS
    assert any(len(found) > 1 and found[0][1] < SHORTEST for found in spans)
    replay = ("--replay", str(journal_of(ran)), "--rollout-num-engines", "2")
    with raylets(2) as cluster:
        hosts = ("--ray-address", cluster.address, "--actor-num-nodes", "2")
        assert run_hash(finish(start(again, *WITHIN, *replay, *hosts))) == wanted
    assert steps_of(journal_of(again)) == steps
    for directory in (ran, again):
        for record in metrics_of(directory):
            assert record["probe/num_mismatched_tokens"] == 0
            assert record["parity/num_mismatched_tokens"] == 0
            assert record["rollout/num_failed_episodes"] == 0
