"""How long a command will take at least."""

import dataclasses

import pytest

from onpolicy.config.groups import EngineCountConfig
from onpolicy.config.tools import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.run.launch.duration import (
    MOST_SAMPLED_PER_SECOND,
    STEP,
    Work,
    bench_work,
    operations_per_second,
    verify_work,
)

WORK = Work(scored=240, trained=30, decode_steps=80, sampled=2 * MOST_SAMPLED_PER_SECOND)


@pytest.fixture(scope="module")
def size(checkpoint):
    return ModelSize.of(load_config(str(checkpoint)))


def test_that_of_verify_is_a_sum_over_both_rounds():
    work = verify_work([10, 30], max_new_tokens=20, trained=1, at_once=1)
    assert work == dataclasses.replace(WORK, sampled=2 * 2 * 20)


def test_it_grows_with_the_operations_and_falls_with_their_speed(size):
    longer = dataclasses.replace(WORK, trained=WORK.trained + 7)
    assert longer.operations(size) - WORK.operations(size) == 7 * STEP * size.parameters
    assert WORK.seconds(size, 10.0, "cuda") == WORK.operations(size) / 10
    assert operations_per_second(size, "cpu") > 0


def test_on_a_cpu_tokens_take_their_time_however_small_a_model_is(size):
    speed = 1e30
    assert WORK.seconds(size, speed, "cpu") - WORK.seconds(size, speed, "cuda") == 2


def bench(**values):
    return BenchConfig(repetitions=4, num_prompts=6, prompt_len=10, max_new_tokens=20, **values)


def test_a_benchmark_of_rollouts_samples_every_prompt_once_a_repetition():
    work = bench_work(bench(what="rollout"), 2, at_once=3)
    assert work == Work(scored=600, trained=0, decode_steps=2 * 5 * 2 * 20, sampled=1200)


def test_servers_share_what_is_sampled():
    engines = EngineCountConfig(rollout_num_engines=2)
    assert bench_work(bench(what="rollout", engines=engines), 2, at_once=6).sampled == 600


def test_a_benchmark_of_steps_trains_on_every_size():
    work = bench_work(bench(what="step", num_tokens=(100, 300)), 2, at_once=6)
    assert work == Work(scored=0, trained=2 * 5 * 400, decode_steps=0, sampled=0)


def test_a_benchmark_of_loops_trains_on_all_samples_and_scores_them_again_on_stock_operators():
    config = bench(what="loop", n_samples_per_prompt=2)
    work = bench_work(config, 2, at_once=12)
    samples = 12
    assert work.trained == 2 * 5 * samples * 30
    assert work.sampled == 2 * 5 * samples * 20
    assert work.scored == 2 * 5 * 6 * 10 + 5 * samples * 30
    aligned_alone = bench_work(dataclasses.replace(config, longest_response=40), 2, at_once=12)
    assert aligned_alone.scored == 2 * 5 * 6 * 10
