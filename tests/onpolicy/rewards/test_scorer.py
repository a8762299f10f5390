import time

import pytest

from onpolicy.config.groups import RewardConfig
from onpolicy.errors import ConfigError
from onpolicy.rewards.scorer import Scorer
from onpolicy.types import FinishReason, Prompt, Sample


def sample(response, label="42"):
    prompt = Prompt(index=0, token_ids=[1], label=label, text="")
    return Sample(
        prompt=prompt,
        sample_index=0,
        response_ids=[2],
        rollout_log_probs=[-1.0],
        finish_reason=FinishReason.STOP,
        weight_version="0",
        num_cached_tokens=0,
        response=response,
    )


def length_or_hang(sample):
    if sample.response == "hang":
        time.sleep(60)
    return {"score": len(sample.response), "half": len(sample.response) / 2}


def wrong_kind(sample):
    return {"other": 1.0} if sample.response == "dict" else "text"


def not_finite(sample):
    return float("nan")


async def asynchronous(sample):
    return 1.0


@pytest.fixture
def scorer(monkeypatch, request):
    """A scorer whose worker process can import this file."""
    monkeypatch.syspath_prepend(str(request.path.parent))
    monkeypatch.setenv("PYTHONPATH", str(request.path.parent))
    made = []

    def make(**config):
        if "function" in config:
            config["custom_rm_path"] = f"test_scorer.{config.pop('function')}"
        made.append(Scorer(RewardConfig(**config)))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def test_a_rule_scores_samples_in_order(scorer):
    samples = [sample("42"), sample("41"), sample("42")]
    metrics = scorer(rm_type="exact").score(samples)
    assert [s.reward for s in samples] == [1.0, 0.0, 1.0]
    assert metrics["rollout/reward_timeouts"] == 0


def test_a_function_of_ones_own_may_return_parts_and_a_hanging_one_is_ended(scorer):
    samples = [sample("abc"), sample("hang"), sample("abcd")]
    metrics = scorer(function="length_or_hang", rm_time_limit=2.0).score(samples)
    assert [s.reward for s in samples] == [3.0, 0.0, 4.0]
    assert samples[2].reward_parts == {"half": 2.0}
    assert metrics["rollout/reward_timeouts"] == 1


@pytest.mark.parametrize(
    ("function", "response", "message"),
    [
        ("wrong_kind", "dict", 'must hold the reward under "score"'),
        ("wrong_kind", "text", "must be a number"),
        ("not_finite", "", "a reward must be finite"),
    ],
)
def test_what_is_no_reward_is_refused(scorer, function, response, message):
    with pytest.raises(ConfigError, match=message):
        scorer(function=function).score([sample(response)])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such.function", "cannot be imported"),
        ("time.no_such_function", "cannot be imported"),
        ("test_scorer.__name__", "is a str, not a function"),
        ("test_scorer.asynchronous", "is async"),
    ],
)
def test_a_path_that_is_no_function_is_refused_before_the_first_step(scorer, path, message):
    with pytest.raises(ConfigError, match=rf"--custom-rm-path={path}: {message}"):
        scorer(custom_rm_path=path)


def test_a_label_that_the_rule_cannot_read_is_named(scorer):
    prompts = [sample("", "42").prompt, sample("", " ").prompt]
    with pytest.raises(ConfigError, match=r"data.jsonl: prompt 0, label=' ': --rm-type exact"):
        scorer(rm_type="exact").check_labels(prompts, "data.jsonl")
