from collections import Counter
from types import SimpleNamespace

import pytest

from onpolicy.config.groups import DataConfig
from onpolicy.rollout.curriculum import Curriculum
from onpolicy.rollout.prompt_order import PromptSource
from onpolicy.types import Prompt

COUNT = 8


def make(curriculum="failures", **config):
    prompts = [Prompt(index=i, prompt_ids=[i], label="", text="") for i in range(COUNT)]
    source = PromptSource(prompts, seed=0, shuffle=True)
    return Curriculum(source, DataConfig(curriculum=curriculum, **config))


def measured(curriculum, step, rates):
    """A rollout in which each prompt's responses have passed at its rate."""
    curriculum.begin(step, step)
    rewards = {prompt: [1.0] * round(4 * rate) + [0.5] * round(4 * (1 - rate))
               for prompt, rate in rates.items()}  # fmt: skip
    curriculum.measure(
        SimpleNamespace(prompt=SimpleNamespace(index=prompt), rewards=each)
        for prompt, each in rewards.items()
    )


def visits(curriculum, first, count=800):
    return Counter(curriculum.at(number).index for number in range(first, first + count))


@pytest.mark.parametrize(
    ("kind", "by_rate"),
    [("failures", {0: 1, 0.5: 0.5, 1: 0.05}), ("learnability", {0: 0.05, 0.5: 1, 1: 0.05})],
)
def test_prompts_are_visited_by_their_pass_rates(kind, by_rate):
    curriculum = make(kind)
    rates = {0: 0, 1: 0, 2: 0.5, 3: 0.5, 4: 1, 5: 1}
    measured(curriculum, 0, rates)
    curriculum.begin(1, 1)
    found = visits(curriculum, 8)
    whole = max(found[6], found[7])  # those were not measured, and are visited in every epoch
    for prompt, rate in rates.items():
        assert abs(found[prompt] / whole - by_rate[rate]) < 0.15
    assert found[4] > 0


def test_a_rate_counts_for_weights_that_have_learnt_from_its_rollout_and_no_earlier():
    ahead, plain = make(), make()
    measured(ahead, 0, dict.fromkeys(range(COUNT - 1), 1))
    ahead.begin(1, 0)
    assert visits(ahead, 8, 50) == visits(plain, 8, 50)
    ahead.begin(2, 1)
    assert visits(ahead, 58, 50) != visits(plain, 58, 50)


def test_a_rate_is_the_mean_of_the_last_visits():
    once, thrice = make(curriculum_window=1), make(curriculum_window=3)
    for step, rate in enumerate([0, 0, 1]):
        for curriculum in (once, thrice):
            measured(curriculum, step, dict.fromkeys(range(COUNT - 1), rate))
            curriculum.begin(3, 3)
    assert visits(once, 0)[7] > 1.8 * visits(thrice, 0)[7]


def test_a_number_keeps_its_prompt_and_a_state_goes_on():
    curriculum, again = make(), make()
    measured(curriculum, 0, {0: 1, 1: 0})
    before = [curriculum.at(number) for number in range(4)]
    again.load_state_dict(curriculum.state_dict())
    for each in (curriculum, again):
        each.begin(1, 1)
        assert [each.at(number) for number in range(4)] == before
    assert visits(again, 4) == visits(curriculum, 4)


def test_without_a_curriculum_every_prompt_comes():
    off = make("")
    measured(off, 0, dict.fromkeys(range(COUNT), 1))
    off.begin(1, 1)
    assert visits(off, 0) == dict.fromkeys(range(COUNT), 100)
