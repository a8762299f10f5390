"""docs/rewards.md: its example does what it says, and its table names the fields there are."""

import dataclasses
import operator
import re
from pathlib import Path

import pytest

from onpolicy.config.groups import RewardConfig
from onpolicy.rewards.scorer import Scorer
from onpolicy.trajectory import FinishReason
from onpolicy.types import Prompt, Sample
from tests.support.samples import answered, make_completion

TEXT = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()


def sample(response, finish_reason):
    prompt = Prompt(index=0, prompt_ids=[1], label="82", text="37+45=")
    return Sample(
        prompt=prompt,
        sample_index=0,
        trajectory=answered(prompt, make_completion([2], [-1.0], finish_reason=finish_reason)),
        response=response,
    )


def examples():
    return re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_examples_score(tmp_path):
    code = examples()[0]
    (tmp_path / "rewards.py").write_text(code)
    scorer = Scorer(RewardConfig(custom_rm_path=f"{tmp_path}/rewards.py:score", rm_workers=1))
    samples = [
        sample("It is 82.", FinishReason.STOP),
        sample("37 and 45 are 82", FinishReason.LENGTH),
        sample("no idea", FinishReason.STOP),
    ]
    scorer.try_out(samples[0].prompt)
    scorer.score([samples])
    scorer.close()
    assert [s.reward for s in samples] == [1.0, pytest.approx(0.9), 0.0]
    assert samples[2].reward_parts == {"correct": 0.0}
    assert [s.answer for s in samples] == ["82", "82", ""]

    of_a_group = {}
    exec(examples()[1], of_a_group)
    groups = [sample("82", FinishReason.STOP), sample("no idea", FinishReason.STOP)]
    longer = sample("It is 82.", FinishReason.STOP)
    longer.trajectory = answered(longer.prompt, make_completion([2, 3], [-1.0, -1.0]))
    assert of_a_group["score"]([*groups, longer]) == [1.0, 0.0, 0.5]

    weighs = {}
    exec(examples()[2], weighs)
    longer.trajectory = answered(longer.prompt, make_completion(range(10), [-1.0] * 10))
    weights = [0.0] * 8 + [1.0] * 2
    assert weighs["score"](longer) == {"score": 1.0, "token_weights": weights}


def test_the_table_names_all_fields():
    named = set(re.findall(r"^\| `([\w.]+)`", TEXT, flags=re.MULTILINE))
    read = {name for name, value in vars(Sample).items() if isinstance(value, property)}
    of_sample = {field.name for field in dataclasses.fields(Sample)} | read
    of_prompt = {f"prompt.{f.name}" for f in dataclasses.fields(Prompt)}
    not_read = {"prompt", "prompt.rule", "prompt.rewards", "name"}
    later = {"reward", "reward_parts", "answer", "mismatched_tokens", "learnt", "is_shown"}
    later |= {"has_failed", "is_rewarded", "token_rewards", "token_weights"}  # said by others
    later |= {"metrics", "info", "lags", "teacher_log_probs", "teacher_top"}
    later |= {"group", "episode", "policy_version"}  # places in what is trained on
    not_read |= {"seeds"}
    assert named == (of_prompt | of_sample) - later - not_read


def test_every_field_of_the_table_can_be_read():
    read = sample("It is 82.", FinishReason.STOP)
    chat = [{"role": "user", "content": "37+45="}]
    read.prompt = dataclasses.replace(read.prompt, messages=chat)
    for name in re.findall(r"^\| `([\w.]+)`", TEXT, flags=re.MULTILINE):
        assert operator.attrgetter(name)(read) is not None
    assert read.prompt.token_ids == read.prompt.prompt_ids == [1]
