"""--eval-prompt-data: one path, or slime's and Miles' pairs; and --eval-config, slime's file of sets."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.config.groups.evaluation_flags import eval_sets
from onpolicy.errors import ConfigError


def given(*argv):
    sets = parse(TrainConfig, argv, "onpolicy train").eval_sets
    return {name: each.path for name, each in sets.items()}


def test_a_single_path_has_no_name():
    assert given() == {}
    assert given("--eval-prompt-data", "/d/aime.jsonl") == {"": "/d/aime.jsonl"}


def test_pairs_of_names_and_paths_are_sets():
    argv = ["--eval-prompt-data", "aime", "/d/a.jsonl", "math-500", "b.parquet", "--seed", "1"]
    assert given(*argv) == {"aime": "/d/a.jsonl", "math-500": "b.parquet"}


@pytest.mark.parametrize("value", ["/d/a.jsonl", "[/d/a.jsonl]"])
def test_a_yaml_file_may_hold_a_path_or_a_list(value, tmp_path):
    (tmp_path / "c.yaml").write_text(f"eval_prompt_data: {value}\n")
    assert given("--custom-config-path", str(tmp_path / "c.yaml")) == {"": "/d/a.jsonl"}
    (tmp_path / "c.yaml").write_text("eval_prompt_data: [aime, a.jsonl, math, b.jsonl]\n")
    assert list(given("--custom-config-path", str(tmp_path / "c.yaml"))) == ["aime", "math"]


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        (["aime", "a.jsonl", "math"], "3 values are neither one path nor names"),
        (["a.jsonl", "b.jsonl"], "'a.jsonl' stands where the name of a set is expected"),
        (["data/a", "b.jsonl"], "'data/a' stands where the name"),
        (["aime", "a.jsonl", "aime", "b.jsonl"], "two sets have the same name"),
    ],
)
def test_anything_else_is_refused_with_the_way_to_give_them(values, rule):
    with pytest.raises(ConfigError, match=rule) as error:
        eval_sets(values)
    assert str(error.value).startswith(f"--eval-prompt-data={' '.join(values)}: ")
    assert "Give one path, or: name path [name path ...]" in str(error.value)


RUN = ("--hf-checkpoint", "/m", "--prompt-data", "p.jsonl", "--rm-type", "exact")
SETS = """
eval:
  defaults:
    n_samples_per_eval_prompt: 8
    temperature: 0.7
  datasets:
    - {name: aime, path: /d/aime.jsonl, rm_type: dapo, n_samples_per_eval_prompt: 32, interval: 40}
    - {name: math, path: /d/math.jsonl, temperature: 0, top_p: 1, max_response_len: 64, label_key: a}
"""


@pytest.fixture
def configured(tmp_path):
    """The checked configuration of a run with a file of sets, and with further flags."""

    def configure(text, *argv, run=RUN):
        (tmp_path / "sets.yaml").write_text(text)
        given = ("--eval-config", str(tmp_path / "sets.yaml"), *run, *argv)
        config = parse(TrainConfig, given, "onpolicy train")
        validate(config)
        return config

    return configure


def test_a_set_says_what_it_is_its_file_what_sets_are_and_flags_the_rest(configured):
    flags = ("--eval-interval", "20", "--rollout-top-p", "0.9", "--rollout-top-k", "50")
    flags += ("--rollout-max-response-len", "256", "--eval-temperature", "0.1")
    sets = configured(SETS, *flags).eval_sets
    assert list(sets) == ["aime", "math"]
    aime, math = sets.values()
    assert (aime.path, aime.rm_type, aime.interval) == ("/d/aime.jsonl", "dapo", 40)
    assert (aime.n_samples_per_eval_prompt, aime.temperature, aime.top_p) == (32, 0.7, 0.9)
    assert (aime.top_k, aime.max_response_len, aime.label_key) == (50, 256, "label")
    assert (math.n_samples_per_eval_prompt, math.temperature, math.top_p) == (8, 0.0, 1.0)
    assert (math.interval, math.rm_type, math.max_response_len) == (20, "", 64)
    assert (math.input_key, math.label_key) == ("prompt", "a")


ONE = "eval: {datasets: [{name: a, path: a.jsonl, interval: 2, %s}]}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evals: {}", "unknown key 'evals'. Did you mean eval"),
        ("eval: {dataset: []}", "eval: unknown key 'dataset'. Did you mean datasets"),
        ("eval: {defaults: {}}", "datasets: must be a list of sets"),
        ("eval: [a]", "eval: must be a mapping of defaults and datasets"),
        ("eval: {defaults: {name: a}, datasets: [a]}", "defaults: unknown key 'name'"),
        ("eval: {datasets: [a.jsonl]}", "set 1: must be a mapping of keys to values"),
        ("eval: {datasets: [{name: a}]}", "set 1: path is missing"),
        (ONE % "temprature: 1", "set 1: unknown key 'temprature'. Did you mean temperature"),
        (ONE % "temperature: hot", "set 1: temperature='hot': must be a number"),
        (ONE % "temperature: -1", "set 1: temperature=-1: must be at least 0"),
        (ONE % "temperature: 1e-9", "set 1: temperature='1e-9': SGLang samples greedily"),
        (ONE % "top_k: 0", "set 1: top_k=0: must be -1"),
        (ONE % "n_samples_per_eval_prompt: 1.5", "must be a whole number"),
        (ONE % "rm_type: deepscaler", "set 1: rm_type='deepscaler': must be one of"),
        ((ONE % "").replace("name: a", "name: a/b"), "set 1: name='a/b': a name is letters"),
        ((ONE % "rm_type: math").replace("a.jsonl", "reasoning-gym:b"), "has its own scorer"),
        ((ONE % "rewards: math").replace("a.jsonl", "reasoning-gym:b"), "rewards: reasoning-gym:"),
        (ONE % "rewards: [math, deepscaler=2]", "set 1: rewards=deepscaler=2: 'deepscaler' is no"),
        (ONE % "rewards: [math=half]", "set 1: rewards=math=half: 'half' is no number"),
        (ONE % "rewards: [math, a.math]", "set 1: rewards=math a.math: two of them have one name"),
        (ONE % "rewards: {math: 1}", "set 1: rewards={'math': 1}: must be text"),
        (ONE % "rewards: math, rm_type: math", "set 1: rm_type and rewards: only one may score"),
        (
            (ONE % "").replace("interval: 2, ", ""),
            "a would never be evaluated. Give --eval-interval",
        ),
        (
            "eval: {datasets: [{name: a, path: a}, {name: a, path: b}]}",
            "set 2: name=a: an earlier set has it",
        ),
    ],
)
def test_what_is_wrong_with_a_file_of_sets_is_said_with_its_place(configured, text, message):
    with pytest.raises(ConfigError) as error:
        configured(text)
    assert message in str(error.value)
    assert "--eval-config=" in str(error.value)


def test_a_set_that_nothing_would_score_is_refused(configured):
    problems = ("--hf-checkpoint", "/m", "--prompt-data", "reasoning-gym:chain_sum")
    with pytest.raises(ConfigError, match=r"a: path=a\.jsonl: no reward scores its responses"):
        configured(ONE % "", run=problems)
    configured(ONE % "rm_type: exact", run=problems)
    configured((ONE % "").replace("a.jsonl", "reasoning-gym:chain_sum"), run=problems)
    pairs = ("--eval-prompt-data", "a", "a.jsonl", "--eval-interval", "2")
    with pytest.raises(ConfigError, match=r"--eval-prompt-data=a\.jsonl: no reward"):
        validate(parse(TrainConfig, (*problems, *pairs), "onpolicy train"))


def test_a_set_that_a_service_scores_needs_its_flags_and_reads_them(configured):
    with pytest.raises(ConfigError, match="--rm-url='': remote_rm needs the address"):
        configured(ONE % "rm_type: remote_rm")
    flags = ("--rm-url", "http://h", "--rm-retries", "1")
    assert configured(ONE % "rm_type: remote_rm", *flags).eval_sets["a"].rm_type == "remote_rm"
    with pytest.raises(ConfigError, match="--rm-url=http://h: only --rm-type remote_rm"):
        configured(ONE % "rm_type: math", *flags)


SUMS = """
eval:
  defaults: {interval: 2, rewards: [exact=0.5, own.brief]}
  datasets:
    - {name: sum, path: a.jsonl}
    - {name: rule, path: a.jsonl, rm_type: math}
    - {name: other, path: a.jsonl, rewards: judge=0.1}
    - {name: made, path: "reasoning-gym:chain_sum"}
    - {name: run, path: a.jsonl, rm_type: ""}
"""
JUDGE = ("--judge-url", "http://j/v1", "--judge-model", "j", "--judge-prompt", "f")


def test_a_set_may_have_a_weighted_sum_of_its_own_and_its_flags_are_read(configured):
    sets = configured(SUMS, *JUDGE, "--group-rm").eval_sets
    assert {name: each.sources for name, each in sets.items()} == {
        "sum": {"exact": 0.5, "own.brief": 1.0}, "rule": {"math": 1.0}, "other": {"judge": 0.1},
        "made": {}, "run": {},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="judge needs all three"):
        configured(SUMS)
    with pytest.raises(ConfigError, match="--group-rm=True: only a function of one's own"):
        configured(ONE % "rewards: [exact]", "--group-rm")


def test_sets_come_from_one_place(configured):
    with pytest.raises(ConfigError, match="--eval-prompt-data names sets too"):
        configured(ONE % "", "--eval-prompt-data", "a.jsonl", "--eval-interval", "2")


SAVES = ("--save", "/s", "--save-interval", "2", "--n-samples-per-eval-prompt", "6")


@pytest.mark.parametrize("metric", ["avg@6", "pass@1", "pass@4", "pass@6", "maj@6"])
def test_a_metric_of_a_set_may_choose_the_best_checkpoint(configured, metric):
    configured(ONE % "", *SAVES, "--save-best-metric", f"eval/a/{metric}")


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("eval/a/avg@8", "no evaluation says that. Give one of: eval/a/avg@6, eval/a/pass@1, "),
        ("eval/b/avg@6", "no evaluation says that"),
        ("avg@6", "no evaluation says that"),
    ],
)
def test_another_may_not(configured, metric, message):
    with pytest.raises(ConfigError) as error:
        configured(ONE % "", *SAVES, "--save-best-metric", metric)
    assert str(error.value).startswith(f"--save-best-metric={metric}: {message}")


def test_weights_that_are_not_saved_cannot_be_the_best(configured):
    saves = ("--save", "/s", "--save-interval", "4", "--save-best-metric", "eval/a/avg@1")
    with pytest.raises(ConfigError, match="evaluated after every 2 rollouts, and not all"):
        configured(ONE % "", *saves)
