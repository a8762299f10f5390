"""A small load test, and engines that lose or exchange answers."""

import gc
import os
import resource
import tracemalloc
from contextlib import contextmanager

import pytest

from benchmarks.scale_load import lengths, measure, sampled, serving, write_answers, wrong
from onpolicy.errors import ConfigError, EngineError

ENGINES, SAMPLES, LONGEST = 4, 4, 96
COUNTS = lengths(ENGINES * 16, LONGEST)
NUM_OPEN = 20
SECONDS = (0.3, 0.6)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    file = tmp_path_factory.mktemp("load") / "answers.json"
    write_answers(file, LONGEST)
    return file


def test_engines_hold_all_requests_at_once_and_nothing_is_lost(answers):
    with serving(answers, ENGINES, *SECONDS) as urls:
        found = measure(urls, COUNTS, SAMPLES, answers)
    assert found["wrong"] == 0
    assert found["engines saw"]["most in flight"] == len(COUNTS) == found["requests"]
    assert found["engines saw"]["calls"] <= 1 + 2 * ENGINES, "requests of a moment share a call"


def test_an_engine_that_loses_an_answer_is_found(answers):
    message = "engines down=.*requests without an answer=1:"
    with serving(answers, 1, 0, 0, 17) as urls, pytest.raises(EngineError, match=message):
        sampled(urls, COUNTS, SAMPLES, len(COUNTS))


def test_answers_to_one_another_s_requests_a_flipped_bit_and_a_missing_answer_are_found(answers):
    with serving(answers, ENGINES, 0, 0) as urls:
        first, second, third, *_ = groups = sampled(urls, COUNTS, SAMPLES, 16)
    assert wrong(groups, COUNTS, answers) == []
    one, other = first.samples[1], first.samples[2]
    one.trajectory, other.trajectory = other.trajectory, one.trajectory
    second.samples[0].trajectory.rollout_log_probs.array.view("<i4")[-1] ^= 1
    third.samples[3] = None
    assert wrong(groups, COUNTS, answers) == [1, 2, 4, 11]


def test_no_answer_is_held_as_text_until_its_call_ends(tmp_path):
    """Tokens and scores are 25 bytes a token, and the completions' 8; the text of an answer has 16."""
    count, longest = 24, 24_000
    write_answers(file := tmp_path / "answers.json", longest)
    with serving(file, 1, 0.1, 1.0) as urls:
        sampled(urls, [3], 1, 1)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            groups = sampled(urls, [longest - 1000 * i // 3 * 3 for i in range(count)], 1, count)
            tokens = sum(len(sample.response_ids) for group in groups for sample in group.samples)
            assert tracemalloc.get_traced_memory()[0] < 40 * tokens
        finally:
            tracemalloc.stop()
            gc.enable()


@contextmanager
def few_open_files():
    """The limit of open files is low; the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + NUM_OPEN, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_requests_that_follow_one_by_one_do_not_run_out_of_open_files(answers):
    """Each has a connection of its own. Engines would count as lost (bespokelabsai/curator #73,
    BerriAI/litellm #12872)."""
    counts = lengths(ENGINES * 100, LONGEST)
    with serving(answers, ENGINES, 0.2, 0.9) as urls, few_open_files():
        groups = sampled(urls, counts, SAMPLES, 40)
    assert wrong(groups, counts, answers) == []


def test_more_requests_in_flight_than_files_may_be_open_are_refused():
    with (
        few_open_files() as limit,
        pytest.raises(ConfigError, match=f"--rollout-max-concurrency={limit}: .*ulimit"),
    ):
        sampled(["http://127.0.0.1:1"], [], 1, limit)
