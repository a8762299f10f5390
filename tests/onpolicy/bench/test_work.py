"""What a benchmark does: lengths fit the model, and that is said."""

import logging

import pytest

from onpolicy.bench.work import fit_bench
from onpolicy.cli.parse import parse
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.engine_args import CONTEXT_MARGIN


@pytest.fixture
def fitted(checkpoint, caplog):
    """(prompt length, new tokens) of a benchmark of a model with a context."""
    caplog.set_level(logging.INFO)
    hf_config = load_config(str(checkpoint))

    def fit(context, *argv):
        hf_config.max_position_embeddings = context
        config = fit_bench(parse(BenchConfig, ["rollout", *argv], "x"), hf_config)
        return config.prompt_len, config.max_new_tokens

    return fit


def test_a_long_context_has_room_for_the_usual_ones_and_nothing_is_said(fitted, caplog):
    assert fitted(130) == (32, 96)
    assert not caplog.messages


def test_the_quickstarts_context_is_two_tokens_too_short_for_a_benchmark(fitted, caplog):
    assert fitted(128) == (32, 94)
    assert caplog.messages == [
        "--max-new-tokens 94, not 96: it was not given, and this is what the model's context of 128 "
        "leaves"
    ]


@pytest.mark.parametrize("context", [5, 8, 16, 64, 127])
def test_those_of_a_benchmark_fit_any_context(fitted, context):
    prompt, sampled = fitted(context)
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
def test_what_was_asked_for_stays_even_if_it_is_the_default(fitted, argv, expected):
    assert fitted(128, *argv) == expected
