"""A trainer and its rollout, whose engines die at any call, in memory; tests/e2e kills real ones."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.errors import ContractError, EngineError, WeightSyncError
from onpolicy.training import distributed
from onpolicy.trajectory import UNPUSHED
from tests.support.engines_in_memory import Engine, Host, make_requests
from tests.support.tiny_policy import ALIGNED, STOCK, make_weights
from tests.support.trainer_in_memory import make_pair

REQUESTS = make_requests(7)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    distributed.init_process_group()
    return tmp_path_factory.mktemp("pair")


def sampled(pair):
    """Everything about the responses but what was cached."""
    return [dataclasses.replace(c, num_cached_tokens=0) for c in pair.generate(REQUESTS)]


def two_rounds(pair):
    """Start, sample from the checkpoint's weights, and from others; what came of it, and digests."""
    results = []
    pair.start()
    for version in range(2):
        pair.make_room()
        pair.trainer.weights = make_weights(seed=version)
        pair.push_weights(version)
        results += [sampled(pair), pair.weight_digest, pair.weight_version]
    return results


@pytest.fixture(scope="module")
def expected(directory):
    return two_rounds(make_pair(Host(), directory))


def test_other_weights_sample_other_responses(expected):
    assert expected[0] != expected[3] and expected[1] != expected[4]
    assert {completion.weight_version for completion in expected[3]} == {1}


CALLS_OF_A_START = 2
DEATHS = st.lists(
    st.sets(st.integers(CALLS_OF_A_START + 1, 45), max_size=4), min_size=1, max_size=3
)


@settings(settings.get_profile("few"))
@given(DEATHS)
def test_any_deaths_within_the_limit_cost_no_bit(directory, expected, dies_at):
    """In a push, in a rollout, or while engines start again; they lose the weights every time."""
    host = Host(*dies_at)
    limit = sum(map(len, dies_at))
    pair = make_pair(host, directory, rollout_num_engines=len(dies_at), rollout_max_restarts=limit)
    assert two_rounds(pair) == expected
    for engine in host.engines:
        assert engine.memory.report()["weights"] == pair.weight_digest


@settings(settings.get_profile("few"))
@given(DEATHS)
def test_servers_that_give_their_memory_back_sample_the_same_whenever_they_die(
    directory, expected, dies_at
):
    later = [{call + 2 for call in calls} for calls in dies_at]  # a start takes their memory too
    host, limit = Host(*later), sum(map(len, dies_at))
    engine = {"rollout_num_engines": len(dies_at), "rollout_max_restarts": limit}
    assert two_rounds(make_pair(host, directory, colocate=True, **engine)) == expected
    assert host.num_restarts <= limit


def test_memory_is_given_back_from_the_end_of_a_rollout_to_the_push_if_gpus_are_shared(directory):
    host = Host()
    pair, other = (make_pair(host, directory, colocate=shares) for shares in (True, False))
    for each in (pair, other):
        each.start()
        each.push_weights(1)
        each.make_room()
    ours, theirs = host.engines
    assert ours.memory.given_back == {"weights", "kv_cache"} and not theirs.memory.given_back
    assert pair.trainer.released == ["state", "weights"] and not other.trainer.released
    with pytest.raises(AssertionError):
        pair.generate(REQUESTS)  # which is what a server without its weights would do, or worse
    pair.push_weights(2)
    assert not ours.memory.given_back
    assert sampled(pair) != sampled(other)  # only the version differs
    assert [c.response_ids for c in sampled(pair)] == [c.response_ids for c in sampled(other)]


def test_servers_that_share_gpus_start_alone_there_and_have_room_made_for_what_is_written(
    directory,
):
    """The trainer is made when they gave their memory back, and gets it again to write a checkpoint."""
    host = Host()
    pair = make_pair(host, directory, colocate=True)
    make_trainer, seen = pair._make_trainer, []

    def made(*args):
        seen.append(set(host.engines[0].memory.given_back))
        return make_trainer(*args)

    pair._make_trainer = made
    pair.start()
    pair.push_weights(1)
    digest, (engine,) = pair.weight_digest, host.engines
    with pair.room():
        seen.append(set(engine.memory.given_back))
    assert seen == [{"weights", "kv_cache"}] * 2 and not engine.memory.given_back
    assert engine.report()["weights"] == digest and engine.memory.version == 1


@pytest.mark.parametrize("call", range(1, 6))
def test_a_server_that_dies_in_a_push_starts_alone_on_its_gpu_and_has_no_cache_beside_the_trainer(
    directory, monkeypatch, call
):
    host = Host()
    pair = make_pair(host, directory, colocate=True, rollout_num_engines=2)
    pair.start()
    pair.push_weights(1)
    pair.make_room()
    engine, seen, start, push = host.engines[0], [], Engine.start, pair.trainer.push

    def started(engine):
        seen.append(("started beside", pair.trainer.released[-1]))
        start(engine)

    def pushed(engines, version):
        pair.trainer.released.append("nothing")
        seen.extend(
            ("pushed to one with", *sorted(e.memory.given_back)) for e in engines if e.memory
        )
        return push(engines, version)

    monkeypatch.setattr(Engine, "start", started)
    monkeypatch.setattr(pair.trainer, "push", pushed)
    engine.dies_at = {engine.calls + call}
    pair.push_weights(2)
    assert ("started beside", "weights") in seen and ("started beside", "nothing") not in seen
    assert {each for each in seen if each[0] == "pushed to one with"} == {
        ("pushed to one with", "kv_cache")
    }
    assert not any(each.memory.given_back for each in host.engines)


CALLS_OF_A_PUSH = {"disk": 3, "tensor": 7}


@pytest.mark.parametrize(
    ("way", "call"), [(way, i + 1) for way, n in CALLS_OF_A_PUSH.items() for i in range(n)]
)
def test_a_death_at_any_call_of_a_push_has_it_repeated_to_all(directory, caplog, way, call):
    host = Host()
    pair = make_pair(host, directory, weight_sync=way, rollout_num_engines=2)
    pair.start()
    engine, other = host.engines
    engine.dies_at = {engine.calls + call}
    pair.push_weights(3)
    assert "pushing the weights of version 3 again" in caplog.text
    assert (engine.starts, other.starts) == (2, 1)
    for engine in host.engines:
        assert engine.report()["weights"] == pair.weight_digest
        assert engine.memory.version == 3 and not engine.memory.in_session


def test_an_engine_that_dies_at_every_push_ends_the_run(directory):
    host = Host()
    pair = make_pair(host, directory, rollout_max_restarts=3)
    pair.start()
    host.engines[0].dies_at = range(4, 99, 3)
    with pytest.raises(EngineError, match="--rollout-max-restarts=3 are used up"):
        pair.push_weights(1)
    assert host.num_restarts == 3


def test_an_error_that_no_engine_died_of_is_raised_from_a_push_and_from_a_rollout(
    directory, tmp_path
):
    host, file = Host(), tmp_path / "file"
    file.write_text("")
    pair = make_pair(host, file)
    pair.start()
    with pytest.raises(WeightSyncError, match="cannot be written"):
        pair.push_weights(1)
    with pytest.raises(ContractError, match="refused a request"):
        pair.generate([dataclasses.replace(REQUESTS[0], prompt_ids=[10**6])])
    assert host.num_restarts == 0


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_engine_that_holds_other_bits_ends_the_run_though_none_died(directory, wrong):
    host = Host()
    pair = make_pair(host, directory, rollout_num_engines=2)
    pair.start()
    host.engines[wrong].memory.flips_a_bit = True
    with pytest.raises(WeightSyncError, match=host.engines[wrong].url):
        pair.push_weights(1)
    assert host.num_restarts == 0


def test_engines_of_another_contract_replace_the_old_ones_and_need_weights(directory):
    host = Host()
    pair = make_pair(host, directory, STOCK)
    pair.start()
    pair.push_weights(0)
    stock = sampled(pair)
    pair.use(ALIGNED, pair.config.fallback, True)
    old, new = host.engines
    assert not old.is_running and new.is_running
    assert new.report()["contract"] == ALIGNED.to_json()
    assert new.memory.version == UNPUSHED
    pair.push_weights(0)
    scores = pair.trainer.log_probs(
        [[*r.prompt_ids, *c.response_ids] for r, c in zip(REQUESTS, sampled(pair), strict=True)],
        [len(r.prompt_ids) for r in REQUESTS],
        0.75,
    )
    assert [row.tolist() for row in scores] == [c.rollout_log_probs for c in sampled(pair)]
    assert stock != sampled(pair)


def test_other_corrections_under_the_same_contract_restart_nothing(directory):
    host = Host()
    pair = make_pair(host, directory)
    pair.start()
    fallback = dataclasses.replace(pair.config.fallback, use_tis=True)
    pair.use(ALIGNED, fallback, True)
    assert pair.trainer.fallback == fallback
    assert len(host.engines) == 1 and host.num_restarts == 0
