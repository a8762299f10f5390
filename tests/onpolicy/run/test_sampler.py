"""Which samples are trained on, and in which groups."""

import pytest

from onpolicy.config.groups import AlgorithmConfig
from onpolicy.run.sampler import make_train_samples, worth_training
from onpolicy.trajectory import Span
from onpolicy.types import Prompt, Sample, SampleGroup
from tests.support.samples import answered, make_completion


def group(index, rewards):
    prompt = Prompt(index=index, prompt_ids=[3], label="", text="")
    samples = [
        Sample(
            prompt=prompt,
            sample_index=i,
            trajectory=answered(prompt, make_completion([5], [-1.0])),
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    ]
    return SampleGroup(prompt=prompt, samples=samples)


GROUPS = [group(0, [1.0, 1.0]), group(1, [0.0, 2.0]), group(2, [0.0, 0.0])]


@pytest.mark.parametrize(("filters", "kept"), [(False, [0, 1, 2]), (True, [1])])
def test_groups_of_equal_rewards_are_left_out_only_if_that_is_asked_for(filters, kept):
    algorithm = AlgorithmConfig(filter_equal_rewards=filters)
    assert [g.prompt.index for g in worth_training(GROUPS, algorithm)] == kept


def test_samples_keep_their_order_and_their_groups():
    made = make_train_samples(GROUPS)
    assert [(m.sample.name, m.group) for m in made] == [
        ("prompt 0, sample 0", 0),
        ("prompt 0, sample 1", 0),
        ("prompt 1, sample 0", 1),
        ("prompt 1, sample 1", 1),
        ("prompt 2, sample 0", 2),
        ("prompt 2, sample 1", 2),
    ]
    assert made[3].sample is GROUPS[1].samples[1]


def test_a_token_lags_by_the_pushes_between_its_weights_and_those_that_learn():
    spans = (Span(version=3, start=0, end=2), Span(version=5, start=2, end=3))
    prompt = Prompt(index=0, prompt_ids=[3], label="", text="")
    completion = make_completion([5, 6, 7], [-1.0] * 3, spans=spans)
    group = SampleGroup(
        prompt=prompt,
        samples=[Sample(prompt=prompt, sample_index=0, trajectory=answered(prompt, completion))],
    )
    (made,) = make_train_samples([group], 5)
    assert made.lags == [2, 2, 0]
    (made,) = make_train_samples([group])
    assert made.lags == [0, 0, 0]
