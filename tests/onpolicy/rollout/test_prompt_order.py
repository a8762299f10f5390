from onpolicy.rollout.prompt_order import PromptSource, joined
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
