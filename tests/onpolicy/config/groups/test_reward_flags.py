"""What scores: one rule, one function, or several with weights."""

import pytest

from onpolicy.config.groups import RewardConfig
from onpolicy.config.rules import validate
from onpolicy.errors import ConfigError
from tests.support.run_in_memory import make_config

DATA = {"prompt_data": ("p.jsonl",)}


def test_the_weights_of_what_scores():
    assert RewardConfig(rm_type="exact").sources == {"exact": 1.0}
    assert RewardConfig(custom_rm_path="a.b").sources == {"a.b": 1.0}
    given = ("math=0.5", "rewards=new.py:brief=-1e-1", "pack.age.f")
    assert RewardConfig(rewards=given).sources == {
        "math": 0.5, "rewards=new.py:brief": -0.1, "pack.age.f": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        (
            ("maths=1",),
            "--rewards=maths=1: 'maths' is no rule. Give NAME=WEIGHT with one of math, dapo",
        ),
        (("",), "--rewards=: '' is no rule"),
        (("math=much",), "--rewards=math=much: 'much' is no number"),
        (("math=nan",), "--rewards=math=nan: 'nan' is no number"),
        (("math", "math=2"), "--rewards=math math=2: two of them have one name"),
        (("a.py:f", "b.py:f"), "two of them have one name, under which each is logged"),
    ],
)
def test_what_is_no_named_reward_is_refused(tmp_path, rewards, says):
    with pytest.raises(ConfigError, match=says):
        validate(make_config(tmp_path, rewards=rewards, **DATA))


def test_one_of_the_three_says_what_scores(tmp_path):
    validate(make_config(tmp_path, rewards=("exact", "a.f=2"), group_rm=True, **DATA))
    with pytest.raises(
        ConfigError, match="--rewards=exact: they stand beside math, and a run needs"
    ):
        validate(make_config(tmp_path, rewards=("exact",), rm_type="math", **DATA))
    with pytest.raises(ConfigError, match="--custom-rm-path='score': names no function"):
        validate(make_config(tmp_path, custom_rm_path="score", **DATA))
    with pytest.raises(ConfigError, match="--group-rm=True: only a function of one's own"):
        validate(make_config(tmp_path, rewards=("exact",), group_rm=True, **DATA))


JUDGE = {"rm_type": "judge", "judge_url": "http://j/v1", "judge_model": "j", "judge_prompt": "f"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"rm_type": "remote_rm"}, "--rm-url='': remote_rm needs the address"),
        ({"rewards": ("remote_rm",)}, "--rm-url='': remote_rm needs the address"),
        ({"rm_type": "remote_rm", "rm_url": "h:1"}, "--rm-url='h:1': is no address. Give one"),
        (
            {"rm_type": "exact", "rm_url": "http://h"},
            "only --rm-type remote_rm, --rewards with it, or a set of --eval-config",
        ),
        (
            {"rm_type": "exact", "rm_retries": 1},
            "--rm-retries=1: only --rm-type remote_rm or judge",
        ),
        (
            {**JUDGE, "judge_model": ""},
            "--judge-model='', --judge-prompt='f': judge needs all three",
        ),
        ({**JUDGE, "judge_verdict": "("}, "is no regular expression"),
        (
            {**JUDGE, "judge_verdict": "a|b"},
            "has 0 groups, and the number is read from the only one",
        ),
        ({**JUDGE, "judge_api_key": "K\x7f"}, r"--judge-api-key=\.\.\.: goes into an HTTP header"),
    ],
)
def test_what_scores_over_http_needs_an_address(tmp_path, flags, says):
    with pytest.raises(ConfigError, match=says):
        validate(make_config(tmp_path, **flags, **DATA))


def test_no_key_of_what_scores_is_written_down(tmp_path):
    both = {**JUDGE, "rm_type": "", "rewards": ("judge", "remote_rm"), "rm_url": "http://h"}
    config = make_config(tmp_path, **both, rm_api_key="K", judge_api_key="L", **DATA)
    validate(config)
    written = config.to_dict()
    assert (written["rm_api_key"], written["judge_api_key"]) == ("...", "...")
