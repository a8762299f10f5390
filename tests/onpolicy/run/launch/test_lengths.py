"""Lengths that nobody asked for fit the model, and that is said; others are as they were asked for."""

import logging

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.config.tools import BenchConfig, ExplainConfig, VerifyConfig
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.engine_args import CONTEXT_MARGIN
from onpolicy.run.launch import lengths
from onpolicy.run.launch.lengths import fit_bench, fit_run, fit_verify


@pytest.fixture
def of_context(checkpoint, monkeypatch, caplog):
    """Sets the context of the model."""
    caplog.set_level(logging.INFO)

    def set_context(context):
        hf_config = load_config(str(checkpoint))
        hf_config.max_position_embeddings = context
        monkeypatch.setattr(lengths, "load_config", lambda *_: hf_config)
        return hf_config

    return set_context


@pytest.fixture
def bench(of_context):
    def fit(context, *argv):
        config = fit_bench(parse(BenchConfig, ["rollout", *argv], "x"), of_context(context))
        return config.prompt_len, config.max_new_tokens

    return fit


def test_a_long_context_has_room_for_the_usual_ones_and_nothing_is_said(bench, caplog):
    assert bench(130) == (32, 96)
    assert not caplog.messages


def test_the_quickstarts_context_is_two_tokens_too_short_for_a_benchmark(bench, caplog):
    assert bench(128) == (32, 94)
    assert caplog.messages == [
        "--max-new-tokens 94, not 96: it was not given, and this is what the model's context of 128 "
        "leaves"
    ]


@pytest.mark.parametrize("context", [5, 8, 16, 64, 127])
def test_those_of_a_benchmark_fit_any_context(bench, context):
    prompt, sampled = bench(context)
    assert prompt >= 1 <= sampled and prompt + sampled + CONTEXT_MARGIN <= context


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--prompt-len", "100"], (100, 26)),
        (["--max-new-tokens", "110"], (16, 110)),
        (["--longest-response", "120"], (6, 96)),
        (["--max-new-tokens", "96", "--prompt-len", "32"], (32, 96)),
        (["--max-new-tokens=96"], (30, 96)),
    ],
)
def test_what_was_asked_for_stays_even_if_it_is_the_default(bench, argv, expected):
    assert bench(128, *argv) == expected


def test_a_runs_responses_leave_half_of_the_context_to_prompts(of_context):
    def response_len(context, *argv):
        of_context(context)
        return fit_run(parse(TrainConfig, argv, "x")).rollout.rollout_max_response_len

    assert response_len(2048) == 1024
    assert response_len(128) == 64
    assert response_len(128, "--rollout-max-response-len", "1024") == 1024


def test_one_from_a_file_was_asked_for(of_context, tmp_path):
    of_context(128)
    (file := tmp_path / "run.yaml").write_text("rollout_max_response_len: 1024\n")
    config = parse(TrainConfig, ["--custom-config-path", str(file)], "x")
    assert fit_run(config).rollout.rollout_max_response_len == 1024


@pytest.mark.parametrize(("config_class", "usual"), [(VerifyConfig, 64), (ExplainConfig, 24)])
def test_the_responses_of_verify_and_explain_do_too(of_context, config_class, usual):
    def new_tokens(context, *argv):
        of_context(context)
        return fit_verify(parse(config_class, argv, "x")).max_new_tokens

    assert new_tokens(256) == usual
    assert new_tokens(40) == 20
    assert new_tokens(40, "--max-new-tokens", str(usual)) == usual
