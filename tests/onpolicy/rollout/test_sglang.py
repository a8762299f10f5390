"""A group of servers that die and hang, on engines in memory; tests/e2e kills real ones."""

import dataclasses
import inspect
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.config.groups import EngineConfig
from onpolicy.errors import ConfigError, ContractError, EngineError
from onpolicy.rollout.base import EnginesRestartedError, SamplingJob
from onpolicy.rollout.client import EngineClient
from onpolicy.rollout.engine_args import CACHE_MARGIN
from onpolicy.rollout.server import EngineServer
from onpolicy.trajectory import Trajectory
from tests.support.engines_in_memory import (
    CACHE_TOKENS,
    SELF_CHECK,
    Engine,
    Host,
    make_requests,
)
from tests.support.tiny_policy import ALIGNED

REQUESTS = make_requests(9, seed=1)


def started(host, **config):
    group = host.make_group(EngineConfig(**config))
    group.launch()
    group.connect(SELF_CHECK)
    return group


def sampled(group, requests=REQUESTS):
    """The completions, after as many restarts as it takes, without what caches were filled with."""
    job = SamplingJob(requests)
    while True:
        try:
            completions = group.generate(job)
        except EnginesRestartedError:
            continue
        return [dataclasses.replace(completion, num_cached_tokens=0) for completion in completions]


EXPECTED = sampled(started(Host()))


@pytest.mark.parametrize("real", [EngineServer, EngineClient])
def test_engines_in_memory_offer_what_real_ones_do(real):
    for name, method in inspect.getmembers(real, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(Engine, name)).parameters
            assert list(ours) == list(inspect.signature(method).parameters)


def test_a_job_that_is_interrupted_has_parts_which_other_requests_continue():
    """As the same response in one piece, but for what is drawn again."""
    host, job = Host(), SamplingJob(REQUESTS, takes_parts=True)
    host.pause = lambda: 0.02
    group = started(host, rollout_num_engines=2)
    timer = threading.Timer(0.05, job.interrupt)
    timer.start()
    group.generate(job)
    timer.join()
    assert any(part.finish_reason == "abort" for part in job.completions)
    for engine in host.engines:
        engine.pause = lambda: 0.0
    for request, part, whole in zip(REQUESTS, job.completions, EXPECTED, strict=True):
        if part.finish_reason == "abort":
            done = part.response_ids
            left = dataclasses.replace(request.params, max_new_tokens=6 - len(done))
            ids = [*request.prompt_ids, *done]
            more = dataclasses.replace(request, prompt_ids=ids, params=left)
            (rest,) = sampled(group, [more])
            part = Trajectory.begin(request.prompt_ids).plus(part, 1.0).plus(rest, 1.0)
        assert part.response_ids == whole.response_ids
        assert part.rollout_log_probs == whole.rollout_log_probs


def test_requests_differ_in_what_they_sample_and_an_equal_one_gives_an_equal_response():
    assert len({repr(completion) for completion in EXPECTED}) == len(REQUESTS)
    assert {completion.finish_reason for completion in EXPECTED} == {"stop", "length"}
    assert sampled(started(Host()), REQUESTS[::-1]) == EXPECTED[::-1]


@given(st.integers(1, 5), st.integers(1, 4))
def test_any_number_of_engines_samples_what_one_does(num_engines, concurrency):
    group = started(Host(), rollout_num_engines=num_engines, rollout_max_concurrency=concurrency)
    assert sampled(group) == EXPECTED


def test_every_engine_takes_its_share():
    host = Host()
    sampled(started(host, rollout_num_engines=3, rollout_max_concurrency=1))
    assert all(engine.answered for engine in host.engines)


CALLS_OF_A_START = 2
"""Of an engine: whether it is healthy, and what it reports."""

DEATHS = st.lists(
    st.sets(st.integers(CALLS_OF_A_START + 1, 25), max_size=5), min_size=1, max_size=4
)


@given(DEATHS, st.integers(1, 4))
def test_any_deaths_within_the_limit_cost_no_bit_and_no_request_is_answered_twice(
    dies_at, concurrency
):
    """Those of engines that start again included."""
    host = Host(*dies_at)
    group = started(
        host,
        rollout_num_engines=len(dies_at),
        rollout_max_concurrency=concurrency,
        rollout_max_restarts=sum(map(len, dies_at)),
    )
    assert sampled(group) == EXPECTED
    assert set(host.answered.values()) == {1} and host.answered.total() == len(REQUESTS)
    died = [sum(call <= engine.calls for call in engine.dies_at) for engine in host.engines]
    assert [engine.starts - 1 for engine in host.engines] == died


def test_what_a_job_misses_after_a_death_is_sent_when_it_comes_again_and_nothing_else():
    host, job = Host({7}), SamplingJob(REQUESTS)
    group = started(host, rollout_max_concurrency=1)
    with pytest.raises(EnginesRestartedError):
        group.generate(job)
    assert job.missing == [4, 5, 6, 7, 8] and host.answered.total() == 4
    assert group.generate(job) == group.generate(job) == EXPECTED
    assert set(host.answered.values()) == {1}


def test_another_job_of_the_same_requests_is_sampled_anew_to_the_same_bits():
    host = Host()
    group = started(host)
    assert sampled(group) == sampled(group) == EXPECTED
    assert set(host.answered.values()) == {2}


def test_an_engine_that_lives_goes_on_with_the_requests_of_one_that_died():
    host = Host(set(), {3})
    group = started(host, rollout_num_engines=2, rollout_max_concurrency=1)
    with pytest.raises(EnginesRestartedError):
        group.generate(SamplingJob(REQUESTS))
    assert host.answered.total() == len(REQUESTS)


def test_progress_counts_every_response_once_however_often_engines_die():
    group, seen = started(Host({5, 9}), rollout_max_concurrency=2), []
    group.on_progress = lambda done, tokens: seen.append((done, tokens))
    lengths = [len(completion.response_ids) for completion in sampled(group)]
    assert [done for done, _ in seen] == list(range(1, len(REQUESTS) + 1))
    assert sorted(tokens for _, tokens in seen) == sorted(lengths)


def test_restarts_are_counted_over_the_run_and_beyond_the_limit_it_ends_with_what_is_missing():
    host = Host({6, 9, 13})
    group = started(host, rollout_max_concurrency=1, rollout_max_restarts=2)
    with pytest.raises(EngineError) as ended:
        sampled(group)
    assert host.num_restarts == 2 and host.answered.total() == 4
    assert str(ended.value) == (
        "engines down=['http://127.0.0.1:30000'], requests without an answer=5: all "
        "--rollout-max-restarts=2 are used up. Their logs may say why they died:"
        "\nlogs/engine_0.log:\n    died in call 13"
    )


def test_an_engine_that_dies_whenever_it_starts_uses_up_the_restarts():
    host = Host(range(3, 99))
    group = started(host, rollout_max_restarts=4)
    with pytest.raises(EngineError, match="--rollout-max-restarts=4 are used up"):
        group.generate(SamplingJob(REQUESTS))
    assert host.num_restarts == 4


def test_an_engine_that_hangs_is_started_again(monkeypatch):
    monkeypatch.setattr("onpolicy.rollout.sglang._HEALTH_PAUSE", 0.001)
    host = Host()
    group = started(host, rollout_num_engines=2, rollout_health_timeout=0.01)
    host.engines[1].hangs_at = {4}
    assert sampled(group) == EXPECTED
    assert [engine.starts for engine in host.engines] == [1, 2]
    assert set(host.answered.values()) == {1}


def test_engines_of_someone_else_are_not_started_again():
    host, url = Host({4}), "http://127.0.0.1:9"
    theirs = host.make_group(EngineConfig(rollout_base_port=9))
    theirs.launch()
    group = started(host, rollout_server_url=(url,), rollout_max_concurrency=1)
    message = rf"engines down=\['{url}'\], requests without an answer=7: onpolicy did not start"
    with pytest.raises(EngineError, match=message):
        group.generate(SamplingJob(REQUESTS))
    group.stop()
    assert host.num_restarts == 0


def test_revive_starts_the_dead_alone_and_says_whether_there_were_any():
    host = Host()
    group = started(host, rollout_num_engines=3)
    assert not group.revive()
    host.engines[1].stop()
    assert group.revive()
    assert [engine.starts for engine in host.engines] == [1, 2, 1]
    assert not group.revive()


def test_a_server_that_starts_at_another_address_is_asked_there():
    """As one does whose host has left the cluster."""

    class Moving(Engine):
        def start(self):
            super().start()
            self.url = f"http://10.0.0.{self.starts}:1"

    host = Host()
    host.make_server = lambda spec, port, log: Moving(spec, 1, log)
    host.make_client = lambda url, *_: EngineClient(url, "", 1.0, 1.0)
    group = host.make_group(EngineConfig())
    group.launch()
    assert group.clients[0].url == "http://10.0.0.1:1"
    group._start_again(group.servers, "")
    assert group.clients[0].url == "http://10.0.0.2:1"


def test_an_engine_that_starts_again_under_another_contract_is_refused():
    host = Host()
    group = started(host)
    host.engines[0].spec = dataclasses.replace(
        host.engines[0].spec, contract=dataclasses.replace(ALIGNED, dtype="bfloat16")
    )
    host.engines[0].stop()
    with pytest.raises(ContractError, match=f"the trainer's is {ALIGNED.fingerprint}"):
        group.revive()


def test_an_engine_whose_operators_give_other_bits_is_refused_by_operator():
    group = Host().make_group(EngineConfig())
    group.launch()
    with pytest.raises(ContractError, match=r"operators=\['table'\] give other bits"):
        group.connect({"table": "0badcafe"})


def test_stop_ends_every_engine_and_may_come_twice():
    host = Host()
    group = started(host, rollout_num_engines=2)
    for _ in range(2):
        group.stop()
        assert not any(engine.is_running for engine in host.engines)


def connect(**spec):
    group = Host().make_group(EngineConfig(), **spec)
    group.launch()
    group.connect(SELF_CHECK)


def test_a_cache_that_is_smaller_than_asked_for_is_refused():
    longest = CACHE_TOKENS - CACHE_MARGIN
    connect(cache_tokens=CACHE_TOKENS, longest_sequence=longest)
    with pytest.raises(
        ConfigError, match=r"max-total-tokens=1001 are asked for.* cache of 1000 tokens.*needs 1000"
    ):
        connect(cache_tokens=CACHE_TOKENS + 1, longest_sequence=longest)


def test_a_server_that_cannot_hold_the_longest_sequence_is_refused():
    """On a GPU, or elsewhere, its cache is known when it has started."""
    with pytest.raises(ConfigError, match=r"its cache holds 1000 tokens, and .* need 1001"):
        connect(longest_sequence=CACHE_TOKENS - CACHE_MARGIN + 1)


def test_a_server_without_a_tokenizer_is_refused_where_stop_strings_may_be_asked_for(monkeypatch):
    report = Engine.report
    monkeypatch.setattr(Engine, "report", lambda engine: {**report(engine), "serves_text": False})
    connect()
    with pytest.raises(ConfigError, match=r"^http.*: has no tokenizer \(--skip-tokenizer-init\)"):
        connect(serves_text=True)


@pytest.mark.parametrize("colocate", [False, True])
def test_servers_that_share_gpus_are_up_before_the_trainer_loads(monkeypatch, colocate):
    waited = []
    monkeypatch.setattr(Engine, "wait_until_healthy", lambda self, timeout: waited.append(timeout))
    Host().make_group(EngineConfig(colocate=colocate, rollout_num_engines=2)).launch()
    assert len(waited) == 2 * colocate
