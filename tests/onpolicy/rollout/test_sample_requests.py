import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.errors import EngineError
from onpolicy.rollout.rollouter import SingleTurn
from onpolicy.rollout.sample_requests import (
    make_group,
    make_requests,
    open_group,
    require_version,
    sample_groups,
)
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.rollout.statistics import rollout_metrics
from onpolicy.trajectory import Completion, FinishReason, Span, Trajectory
from onpolicy.types import Prompt, Sample, SamplingParams

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4, stop_token_ids=(1,))
PROMPTS = [Prompt(index=i, prompt_ids=[7, i], label=str(i), text="") for i in (5, 5, 6)]


def completions(version=2):
    reasons = [FinishReason.STOP, FinishReason.LENGTH] * 3
    return [
        Completion(
            response_ids=[i] * (i + 1),
            rollout_log_probs=[-0.5] * (i + 1),
            finish_reason=reason,
            weight_version=version,
            num_cached_tokens=i,
        )
        for i, reason in enumerate(reasons)
    ]


def groups_of(texts):
    """The completions as samples: two of each prompt, with these texts."""
    drawn = []
    for i, prompt in enumerate(PROMPTS):
        group = open_group(i, prompt, make_group(prompt, 2, PARAMS, i), SingleTurn())
        for episode, completion in zip(group, completions()[2 * i :], strict=False):
            trajectory = Trajectory.begin(prompt.prompt_ids).plus(completion, PARAMS.temperature)
            episode.samples = [
                Sample(prompt=prompt, sample_index=episode.index, trajectory=trajectory)
            ]
        drawn.append(group)
    return sample_groups(drawn, lambda token_ids: texts)


def test_every_request_has_a_seed_of_its_own_even_for_a_prompt_that_comes_twice():
    requests = make_requests(PROMPTS, 4, PARAMS, 0, "rollout", 0)
    assert len({request.sampling_seed for request in requests}) == 12
    assert requests == make_requests(PROMPTS, 4, PARAMS, 0, "rollout", 0)


@pytest.mark.parametrize("key", [(1, "rollout", 0), (0, "rollout", 1), (0, "eval", 0)])
def test_another_run_step_or_purpose_has_other_seeds(key):
    seeds = {r.sampling_seed for r in make_requests(PROMPTS, 4, PARAMS, 0, "rollout", 0)}
    assert seeds.isdisjoint(r.sampling_seed for r in make_requests(PROMPTS, 4, PARAMS, *key))


def test_completions_come_back_by_prompt_in_order():
    groups = groups_of("abcdef")
    assert [[s.response for s in g.samples] for g in groups] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert groups[1].samples[1].token_ids == [7, 5, 3, 3, 3, 3]
    assert [s.sample_index for s in groups[2].samples] == [0, 1]


def test_a_response_from_other_weights_is_refused():
    with pytest.raises(EngineError, match="weight_version=1 on a response, but the policy's is 2"):
        require_version(completions(1)[0], 2)


def spans(*ends):
    """Of version 1, then of version 2 up to the last end."""
    starts = [0, *ends[:-1]]
    return tuple(
        Span(version=i + 3 - len(ends), start=start, end=end)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
    )


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("found", [spans(2, 4), spans(3), spans(5)])
def test_a_response_with_tokens_from_other_weights_is_refused_token_by_token(found, by_token):
    good = dataclasses.replace(completions()[3], spans=spans(4))
    require_version(good, 2, by_token=by_token)
    with pytest.raises(EngineError, match="weight_versions="):
        require_version(dataclasses.replace(good, spans=found), 2, by_token=by_token)


def test_an_engine_that_does_not_say_it_of_tokens_will_do_where_nothing_lags():
    require_version(completions()[3], 2)
    with pytest.raises(EngineError, match="does not say which weights"):
        require_version(completions()[3], 2, by_token=True)


def test_metrics_of_a_rollout():
    groups = groups_of("abcdef")
    for reward, sample in enumerate(s for g in groups for s in g.samples):
        sample.reward, sample.reward_parts = float(reward), {"answered": 1.0}
    metrics = rollout_metrics(groups)
    assert metrics["rollout/raw_reward"] == 2.5
    assert metrics["rollout/response_length"] == 3.5
    assert metrics["rollout/response_length_max"] == 6
    assert metrics["rollout/truncated_ratio"] == 0.5
    assert metrics["rollout/num_cached_tokens"] == 15
    assert metrics["rollout/prefix_cache_hit_rate"] == 15 / 12
    assert metrics["rollout/log_probs"] == -0.5
    assert metrics["rollout/reward/answered"] == 1


keys = st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99), st.integers(0, 9))


@given(st.sets(keys, min_size=2, max_size=50))
def test_every_key_has_a_seed_of_its_own(keys):
    seeds = {sampling_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_parts_of_the_key_do_not_run_together():
    assert sampling_seed(1, 23) != sampling_seed(12, 3)


def test_seeds_are_the_same_in_every_process_and_version():
    assert sampling_seed(0, "rollout", 3, 1, 2) == 2600601268320889156
