import json

import pytest

from onpolicy.rewards.reasoning_gym import check_label, score
from onpolicy.rollout.reasoning_gym import rows_of

ROW = next(rows_of("reasoning-gym:chain_sum", 1, 0, "--prompt-data"))[1]
ANSWER = json.loads(ROW["label"])["answer"]


def test_its_own_scorer_judges_the_answer():
    assert score(ANSWER, ROW["label"]) == 1.0
    assert score(f"<answer>1</answer> No: <answer> {ANSWER} </answer>.", ROW["label"]) == 1.0
    assert score(f"<answer>{ANSWER}</answer> No: <answer>x</answer>.", ROW["label"]) == 0.0
    assert 0 < score(f"it is {ANSWER}", ROW["label"]) < 1


@pytest.mark.parametrize("label", ["4", "{}", "text", '{"name": "chain_sum"}'])
def test_a_label_must_be_a_problem(label):
    with pytest.raises(ValueError):
        check_label(label)
    check_label(ROW["label"])
