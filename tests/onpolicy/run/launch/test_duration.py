"""How long a command will take at least."""

import dataclasses

import pytest

from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.run.launch.duration import (
    MOST_SAMPLED_PER_SECOND,
    STEP,
    Work,
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
