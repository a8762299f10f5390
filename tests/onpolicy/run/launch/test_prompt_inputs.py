"""What the prompts of an evaluation set are scored by, from its file to its samples' rewards."""

import json

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.errors import ConfigError
from onpolicy.rewards.scorer import Scorer
from onpolicy.run.launch.inputs import PromptReader
from tests.support.samples import to_score
from tests.support.tiny import make_tokenizer

SETS = """
eval:
  datasets:
    - {name: sum, path: FILE, rewards: [exact=0.5, dapo=-2]}
    - {name: broken, path: FILE, rewards: [exact, gone.brief]}
    - {name: run, path: FILE}
"""


@pytest.fixture
def reader(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "ab", "label": "42"}))
    (tmp_path / "sets.yaml").write_text(SETS.replace("FILE", str(data)))
    argv = ["--rm-type", "exact", "--eval-config", str(tmp_path / "sets.yaml"), "--rm-workers", "1"]
    config = parse(TrainConfig, argv, "onpolicy train")
    scorer = Scorer(config.reward)
    yield PromptReader(
        config=config, scorer=scorer, tokenizer=make_tokenizer(), vocab_size=999, longest=20
    )
    scorer.close()


def test_a_sets_sum_scores_its_samples_and_the_runs_reward_those_of_another(reader):
    samples = []
    for name, said in (("sum", "42"), ("sum", "Answer: 42"), ("run", "42")):
        samples.append(to_score(said))
        (samples[-1].prompt,) = reader.read_set(reader.config.eval_sets[name]).prompts
    reader.scorer.score([samples])
    assert [sample.reward for sample in samples] == [0.5 + 2, -2, 1]
    assert samples[0].reward_parts == {"exact": 1.0, "dapo": -1.0, "dapo/answered": 0.0}
    assert samples[2].reward_parts == {}


def test_a_function_of_a_set_is_tried_before_anything_starts(reader):
    with pytest.raises(ConfigError, match="gone"):
        reader.read_set(reader.config.eval_sets["broken"])
