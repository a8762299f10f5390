"""Two real ranks in processes of Ray's, beside a trainer in this one."""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from onpolicy.config.groups import ClusterConfig, OperatorsConfig
from onpolicy.contract import NO_SPLIT_K
from onpolicy.errors import CheckpointError, ParityError, TrainerLostError
from onpolicy.explain.microscope import recorded_log_probs, recordings
from onpolicy.explain.source import count_sites
from onpolicy.explain.taps.recorder import Recorder, Recording
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch.contracts import contract_for
from onpolicy.training import make_trainer
from tests.support.forked_processes import forked_processes
from tests.support.processes import is_gone
from tests.support.samples import make_train_sample
from tests.support.train_runs import wait_for
from tests.support.unstarted_run import changed, make_config

pytestmark = pytest.mark.engine

SEQUENCES = [list(range(i, i + 30)) for i in range(2, 7)]
PROMPTS = [4] * len(SEQUENCES)
RATES = [1e-3, 1e-3]


@pytest.fixture(scope="module")
def parts(checkpoint, tmp_path_factory):
    """(configuration, contract, directory) of ranks that have several micro-batches each."""
    directory = tmp_path_factory.mktemp("ranks")
    config = changed(
        make_config(checkpoint, directory),
        max_tokens_per_gpu=40,
        cpu_threads=1,
        advantage_estimator="reinforce",
    )
    return config, contract_for(config, load_config(str(checkpoint)), aligned=True), directory


@pytest.fixture(scope="module")
def hosts():
    from onpolicy.cluster.ray_session import session

    with forked_processes(), session(ClusterConfig()) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def make_ranks(parts, hosts):
    from onpolicy.cluster.placement import Slot
    from onpolicy.cluster.trainer_ranks import TrainerRanks

    config, contract, directory = parts
    slot = Slot(host=hosts[0], devices=(), cpu_threads=1)
    return lambda: TrainerRanks(config, contract, directory / "logs", [slot, slot])


@pytest.fixture(scope="module")
def ranks(make_ranks):
    ranks = make_ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def alone(parts):
    config, contract, _ = parts
    return make_trainer(config, contract, 1)


def samples_of(log_probs, advantages=(1.0, -1.0, 0.5, -0.5, 0.25)):
    return [
        make_train_sample(tokens, 4, row.tolist(), advantage, i)
        for i, (tokens, row, advantage) in enumerate(
            zip(SEQUENCES, log_probs, advantages, strict=True)
        )
    ]


def test_ranks_check_and_score_as_a_trainer_in_this_process(ranks, alone):
    assert ranks.self_check == alone.self_check
    theirs, ours = (t.log_probs(SEQUENCES, PROMPTS, 1.0) for t in (ranks, alone))
    assert all(torch.equal(x, y) for x, y in zip(theirs, ours, strict=True))


def test_ranks_start_under_the_variables_of_their_operators(parts, hosts):
    from onpolicy.cluster.placement import Slot
    from onpolicy.cluster.trainer_ranks import TrainerRanks

    config, contract, directory = parts
    config = dataclasses.replace(config, operators=OperatorsConfig(operators="cublaslt"))
    slot = Slot(host=hosts[0], devices=(), cpu_threads=1)
    ranks = TrainerRanks(config, contract, directory / "logs of variables", [slot])
    try:
        (environment,) = ranks.on_each_rank(lambda trainer: dict(os.environ))
    finally:
        ranks.close()
    assert environment.items() >= NO_SPLIT_K.items()


def put_answers(count, **failing):
    import ray

    from onpolicy.cluster.trainer_rank import Answer

    errors = {int(rank.removeprefix("r")): error for rank, error in failing.items()}
    return [ray.put(Answer(result=i, error=errors.get(i), traceback=f"{i}")) for i in range(count)]


def test_answers_that_are_there_are_taken_together_and_not_one_by_one(ranks, monkeypatch):
    """Waiting for one of n at a time costs n^2 (ray-project/ray#49905)."""
    import ray

    waits, wait = [], ray.wait
    monkeypatch.setattr(ray, "wait", lambda *args, **given: waits.append(1) or wait(*args, **given))
    calls = put_answers(64)
    wait(calls, num_returns=len(calls))
    assert ranks._gathered(calls) == [*range(64)]
    assert len(waits) <= 4


def test_the_failure_of_any_rank_among_them_is_raised_as_that_ranks(ranks):
    with pytest.raises(CheckpointError, match="gone") as raised:
        ranks._gathered(put_answers(5, r3=CheckpointError("gone")))
    assert str(raised.value.__cause__).startswith("rank 3 of the trainer")


def test_ranks_record_what_a_trainer_in_this_process_does(ranks, alone):
    asked = recorded_log_probs, Recorder(), SEQUENCES, PROMPTS, 1.0
    (ours, own), *others = (answer for t in (alone, ranks) for answer in t.on_each_rank(*asked))
    for theirs, _ in others:
        assert all(torch.equal(x, y) for x, y in zip(theirs, ours, strict=True))
    (rollout,), (train,) = recordings([recorded for _, recorded in others]), recordings([own])
    found = {counts.site: counts for counts in count_sites(rollout, [train])}
    assert found.keys() == train.keys()
    assert all(c.inputs_differ == c.outputs_differ == 0 for c in found.values())
    assert all(c.rows == len(train[site][0].keys) for site, c in found.items())
    # One rank has a part of the rows.
    part = list(count_sites(Recording.of(others[0][1].passes[:1]), [train]))
    assert all(counts.rows < len(train[counts.site][0].keys) for counts in part)


def test_a_mismatch_is_raised_as_what_it_was_with_its_traceback_and_whose_it_was(ranks, alone):
    log_probs = alone.log_probs(SEQUENCES, PROMPTS, 1.0)
    log_probs[3] = log_probs[3] + 1.0
    with pytest.raises(ParityError, match=r"26 of \d+ tokens") as refused:
        ranks.train(samples_of(log_probs), step=0, rates=[1e-3])
    assert "train_share" in str(refused.value.__cause__)
    found = refused.value.findings.mismatched_tokens
    assert found[3] == 26 and set(found) <= {0, 26, None}
    assert refused.value.findings.apart[0] == 3


def test_a_rollout_is_trained_on_by_the_ranks_that_hold_its_samples(ranks, alone):
    samples = samples_of(alone.log_probs(SEQUENCES, PROMPTS, 1.0))
    outcome = ranks.train(samples, step=0, rates=RATES)
    metrics = outcome.metrics
    assert metrics["parity/num_mismatched_tokens"] == 0
    assert metrics["parity/num_compared_tokens"] == 3 * 26  # those of the first optimizer step
    assert outcome.findings.mismatched_tokens == [0, 0, 0, None, None]
    moved = zip(
        ranks.log_probs(SEQUENCES, PROMPTS, 1.0),
        alone.log_probs(SEQUENCES, PROMPTS, 1.0),
        strict=True,
    )
    assert not any(torch.equal(after, before) for after, before in moved)


def test_what_one_saves_another_loads_and_an_export_is_a_checkpoint(ranks, parts, tmp_path):
    expected = ranks.log_probs(SEQUENCES, PROMPTS, 1.0)
    (tmp_path / "saved").mkdir()
    ranks.save(tmp_path / "saved")
    ranks.export(tmp_path / "hf")
    config, contract, _ = parts
    for trainer in (
        make_trainer(config, contract, 1),
        make_trainer(changed(config, hf_checkpoint=str(tmp_path / "hf")), contract, 1),
    ):
        if trainer.config is config:
            trainer.load(tmp_path / "saved")
        found = trainer.log_probs(SEQUENCES, PROMPTS, 1.0)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_an_error_of_a_checkpoint_keeps_its_words(ranks, tmp_path):
    with pytest.raises(CheckpointError, match=r"--load: .*nothing is damaged or does not fit"):
        ranks.load(tmp_path / "nothing")


def test_a_rank_that_is_killed_ends_the_call_and_is_named(make_ranks):
    import ray

    ranks = make_ranks()
    second = ranks._actors[1].__ray_call__.remote(lambda rank: os.getpid())
    os.kill(ray.get(second), signal.SIGKILL)
    with pytest.raises(TrainerLostError, match=r"rank 1 of the trainer .*trainer_1\.log.*--load"):
        ranks.log_probs(SEQUENCES, PROMPTS, 1.0)
    assert "checking the trainer's operators" in Path(ranks._logs[1]).read_text()
    ranks.close()


@pytest.fixture
def impatient(make_ranks):
    """Ranks that count as hung after 1.5 s: (them, their processes)."""
    from ray.cloudpickle import register_pickle_by_value

    register_pickle_by_value(sys.modules[__name__])  # which ranks do not import
    ranks = make_ranks()
    cluster, engine = ranks.config.cluster, ranks.config.engine
    ranks.config = dataclasses.replace(
        ranks.config,
        cluster=dataclasses.replace(cluster, rank_timeout=1.5),
        engine=dataclasses.replace(engine, rollout_health_timeout=1.0),
    )
    yield ranks, [psutil.Process(pid) for _, pid in ranks._processes]
    ranks.close()


def meet(trainer, seconds):
    """All but rank 0 compute before they come to where all meet."""
    ends = time.monotonic() + seconds * torch.distributed.get_rank()
    while time.monotonic() < ends:
        pass
    torch.distributed.barrier()


def wait_for_nobody(trainer):
    """Rank 0 waits where all are to meet, and the others do not come."""
    if torch.distributed.get_rank():
        time.sleep(1000)
    torch.distributed.barrier()


def test_ranks_that_wait_for_one_that_computes_are_waited_for_and_for_one_that_is_stopped_are_not(
    impatient,
):
    ranks, processes = impatient
    assert ranks.on_each_rank(meet, 5.0) == [None, None]
    processes[1].suspend()
    states = r"rank 0 \(sleeping\), rank 1 \(stopped\)"
    with pytest.raises(TrainerLostError, match=rf"--rank-timeout=1\.5: .*{states}.*--load"):
        ranks.on_each_rank(meet, 0.0)
    wait_for(lambda: all(map(is_gone, processes)))


def test_ranks_that_hang_in_a_collective_end_the_call(impatient):
    ranks, processes = impatient
    states = r"rank 0 \(sleeping\), rank 1 \(sleeping\)"
    with pytest.raises(TrainerLostError, match=rf"no rank .* has computed for \d+ s: {states}"):
        ranks.on_each_rank(wait_for_nobody)
    wait_for(lambda: all(map(is_gone, processes)))
