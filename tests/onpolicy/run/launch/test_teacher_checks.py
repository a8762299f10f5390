"""A teacher that could not score what the policy samples is refused by name, before anything starts."""

import json

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.run.launch.teacher_checks import require_teachers, teacher_bytes
from onpolicy.system.network import free_port
from tests.support.tiny import make_checkpoint


def config_of(checkpoint, *argv):
    flags = ["--hf-checkpoint", str(checkpoint), "--prompt-data", "p.jsonl", "--rm-type", "exact"]
    return parse(TrainConfig, [*flags, *argv], "onpolicy train")


def test_a_teacher_of_another_size_with_the_same_tokenizer_is_taken(checkpoint, tmp_path):
    teacher = make_checkpoint(tmp_path / "teacher", "llama")
    config = config_of(checkpoint, "--teacher-checkpoint", str(teacher), "--true-on-policy-mode")
    require_teachers(config, load_tokenizer(str(checkpoint)))
    parameters = ModelSize.of(load_config(str(teacher)), False).parameters
    assert teacher_bytes(config) > 4 * parameters
    assert teacher_bytes(config_of(checkpoint)) == 0


def test_memory_counts_what_a_loss_keeps_of_every_token(checkpoint):
    flags = [
        "--teacher-checkpoint", str(checkpoint), "--rollout-max-response-len", "10", "--opd-loss",
    ]  # fmt: skip
    more = ["--rollout-batch-size", "100"]
    fewer, full, top_k = (
        teacher_bytes(config_of(checkpoint, *flags, *argv))
        for argv in (["full"], ["full", *more], ["top-k", "--opd-top-k", "5", *more])
    )
    tokens = (100 - 32) * 8 * 10
    assert full - fewer == tokens * 2 * load_config(str(checkpoint)).hidden_size
    assert top_k - full == 100 * 8 * 10 * (5 * 12 + 4)


def test_more_of_the_likeliest_tokens_than_there_are_is_refused(checkpoint):
    flags = [
        "--teacher-checkpoint", str(checkpoint), "--opd-loss", "top-k", "--opd-top-k", "100000",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--opd-top-k=100000: the teacher knows"):
        require_teachers(config_of(checkpoint, *flags), load_tokenizer(str(checkpoint)))


def test_another_tokenizer_is_refused(checkpoint, tmp_path):
    teacher = make_checkpoint(tmp_path / "teacher", "qwen3")
    file = teacher / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    one, other = sorted(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"--teacher-checkpoint=.*tokenizer is another .*2 tokens"
    ):
        config = config_of(checkpoint, "--teacher-checkpoint", str(teacher))
        require_teachers(config, load_tokenizer(str(checkpoint)))


def test_an_unknown_teacher_is_refused(checkpoint, tmp_path):
    config = config_of(checkpoint, "--teacher-checkpoint", str(tmp_path / "nobody"))
    with pytest.raises(ConfigError, match=r"--teacher-checkpoint=.*nobody"):
        require_teachers(config, load_tokenizer(str(checkpoint)))


def test_a_teacher_that_does_not_answer_is_refused(checkpoint):
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    config = config_of(checkpoint, "--teacher-url", url, "--rm-retries", "0")
    with pytest.raises(ConfigError, match=f"--teacher-url={url}: the teacher had no answer"):
        require_teachers(config, load_tokenizer(str(checkpoint)))


def several(checkpoint, tmp_path, rows, *names):
    """A run of several teachers and rows that name them."""
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": "1", "label": "1", **row}) + "\n" for row in rows)
    )
    given = [f"{name}={checkpoint}" for name in names]
    flags = ["--hf-checkpoint", str(checkpoint), "--prompt-data", str(data), "--rm-type", "exact"]
    flags += ["--teacher-checkpoint", *given, "--teacher-key", "by"]
    return parse(TrainConfig, flags, "onpolicy train")


def test_several_teachers_are_taken_and_counted(checkpoint, tmp_path):
    config = several(checkpoint, tmp_path, [{"by": "math"}, {"by": "code"}], "math", "code")
    validate(config)
    require_teachers(config, load_tokenizer(str(checkpoint)))
    alone = config_of(checkpoint, "--teacher-checkpoint", str(checkpoint))
    assert teacher_bytes(config) == 2 * teacher_bytes(alone)


@pytest.mark.parametrize("row", [{"by": "law"}, {}, {"by": 3}])
def test_a_row_that_names_no_teacher_is_refused_by_its_number(checkpoint, tmp_path, row):
    config = several(checkpoint, tmp_path, [{"by": "math"}, row], "math", "code")
    with pytest.raises(ConfigError, match=r"rows\.jsonl.*2.*must be one of math, code"):
        require_teachers(config, load_tokenizer(str(checkpoint)))


TEACHER, URL = ["--teacher-checkpoint", "t"], ["--teacher-url", "http://127.0.0.1:1"]
OF_A_TEACHER = "only --teacher-checkpoint or --teacher-url reads it"
NO_NAMES = "give one directory; or with --teacher-key several NAME=DIR"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*TEACHER, "--rollout-temperature", "0.7"], "the teacher's is of temperature 1"),
        ([*TEACHER, "--opd-kl-coef", "0"], "nothing would be learnt from the teacher"),
        ([*TEACHER, "--opd-loss", "full", "--rollout-top-p", "0.9"], "KL over the whole vocabulary"),
        ([*TEACHER, "--opd-top-k", "5"], "only --opd-loss=top-k, --policy-loss=centered or --rs-rules"),
        ([*TEACHER, "--opd-loss", "top-k", "--train-backend", "megatron", "--megatron-pp", "2"],
            "only the last stage"),
        ([*TEACHER, "--opd-reward-coef", "0", "--filter-equal-rewards"], "are not learnt from"),
        ([*TEACHER, "--teacher-api-key", "k"], "only .*--teacher-url reads it"),
        ([*TEACHER, "--rm-retries", "1"], "only .*--teacher-url reads it"),
        ([*TEACHER, "b"], NO_NAMES),
        ([*TEACHER, "a=x", "--teacher-key", "k", "--teacher-checkpoint", "b"], NO_NAMES),
        ([*URL, *TEACHER], "stands beside --teacher-checkpoint"),
        ([*URL, "--rollout-temperature", "0.7"], "the teacher's is of temperature 1"),
        ([*URL, "--rollout-min-p", "0.1"], "log-probabilities over the whole vocabulary"),
        ([*URL, "--opd-loss", "full"], "--opd-loss=full takes the whole vocabulary"),
        ([*URL, "--teacher-key", "by"], "with --teacher-key several NAME=URL"),
        (["--teacher-url", "127.0.0.1:1"], "give one address"),
        (["--teacher-url", "http://a", "http://b"], "give one address"),
        (["--opd-kl-coef", "0.5"], OF_A_TEACHER),
        (["--opd-reward-coef", "0.5"], OF_A_TEACHER),
    ],
)  # fmt: skip
def test_flags_that_contradict_a_teacher_or_that_none_reads_are_refused(checkpoint, argv, message):
    with pytest.raises(ConfigError, match=message):
        validate(config_of(checkpoint, *argv))


def test_a_teacher_behind_a_url_has_retries_and_a_key(checkpoint):
    validate(config_of(checkpoint, *URL, "--rm-retries", "1", "--teacher-api-key", "k"))
