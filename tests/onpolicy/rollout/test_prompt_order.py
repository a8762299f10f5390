from collections import Counter
from copy import deepcopy
from types import SimpleNamespace

import pytest

from onpolicy.config.groups import DataConfig
from onpolicy.rollout.prompt_order import Curriculum, PromptSource, joined
from onpolicy.types import Prompt


def prompts(count):
    return [Prompt(index=i, prompt_ids=[i], label="", text="") for i in range(count)]


def first(source, count):
    return [source.at(position).index for position in range(count)]


def test_every_epoch_visits_every_prompt_once_in_an_order_of_its_own():
    visited = first(PromptSource(prompts(10), seed=0, shuffle=True), 30)
    epochs = [visited[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_prompt_depends_on_seed_and_position_alone():
    ahead, other = (PromptSource(prompts(10), seed=s, shuffle=True) for s in (0, 1))
    late = PromptSource(prompts(10), seed=0, shuffle=True)
    assert late.at(17).index == first(ahead, 18)[17]
    assert first(other, 12) != first(late, 12)


def test_without_shuffling_the_files_order_repeats():
    source = PromptSource(prompts(3), seed=0, shuffle=False)
    assert first(source, 8) == [0, 1, 2, 0, 1, 2, 0, 1]


def two_parts(seed=0):
    together, parts = joined([prompts(4), prompts(6)], (0.7, 0.3))
    return PromptSource(together, seed, shuffle=True, parts=parts)


def test_prompts_of_several_sources_are_numbered_on():
    together, parts = joined([prompts(2), prompts(3)], ())
    assert [prompt.index for prompt in together] == [0, 1, 2, 3, 4]
    assert parts == []


def test_each_source_has_its_share_at_any_time_and_epochs_of_its_own():
    visited = first(two_parts(), 400)
    for count in range(1, 400):
        share = sum(index < 4 for index in visited[:count])
        assert abs(share - 0.7 * count) <= 1
    of_second = [index for index in visited if index >= 4]
    assert all(len({*of_second[i : i + 6]}) == 6 for i in range(0, 60, 6))


def test_a_mixture_depends_on_seed_and_position_alone():
    assert two_parts().at(37).index == first(two_parts(), 38)[37]
    assert first(two_parts(seed=1), 40) != first(two_parts(), 40)


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


def test_a_number_keeps_its_prompt_and_a_state_goes_on():
    curriculum, again = make(), make()
    measured(curriculum, 0, {0: 1, 1: 0})
    before = [curriculum.at(number) for number in range(4)]
    again.resume(deepcopy(curriculum.state))
    for each in (curriculum, again):
        each.begin(1, 1)
        assert [each.at(number) for number in range(4)] == before
    assert visits(again, 4) == visits(curriculum, 4)


def test_without_a_curriculum_every_prompt_comes():
    off = make("")
    measured(off, 0, dict.fromkeys(range(COUNT), 1))
    off.begin(1, 1)
    assert visits(off, 0) == dict.fromkeys(range(COUNT), 100)
