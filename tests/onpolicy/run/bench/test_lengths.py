"""Lengths that nobody asked for fit the model, and that is said; others are refused if they do not."""

import logging

import pytest

from onpolicy.config.tools import BenchFlags
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.engine_args import CONTEXT_MARGIN
from onpolicy.run.bench.lengths import fitted


@pytest.fixture
def lengths(checkpoint, caplog):
    """(--prompt-len, --max-new-tokens) of a benchmark on a model of some context, and what it said."""
    caplog.set_level(logging.INFO)

    def fit(context, **flags):
        hf_config = load_config(str(checkpoint))
        hf_config.max_position_embeddings = context
        config = fitted(BenchFlags(what="rollout", **flags), hf_config)
        return (config.prompt_len, config.max_new_tokens), [r.getMessage() for r in caplog.records]

    return fit


def test_a_long_context_has_room_for_the_usual_ones_and_nothing_is_said(lengths):
    assert lengths(130) == ((32, 96), [])


def test_the_quickstarts_context_is_two_tokens_too_short_for_them(lengths):
    said = "--max-new-tokens 94, not 96: the model's context of 128 leaves no more"
    assert lengths(128) == ((32, 94), [said])


@pytest.mark.parametrize("context", [5, 8, 16, 64, 127])
def test_they_fit_any_context(lengths, context):
    (prompt, sampled), said = lengths(context)
    assert prompt >= 1 <= sampled and prompt + sampled + CONTEXT_MARGIN <= context and said


def test_one_that_was_asked_for_stays_and_the_other_fits_beside_it(lengths):
    assert lengths(128, prompt_len=100)[0] == (100, 26)
    assert lengths(128, max_new_tokens=110)[0] == (16, 110)
    assert lengths(128, longest_response=120)[0] == (6, 96)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"prompt_len": 32, "max_new_tokens": 96},
            "--max-new-tokens=96: with --prompt-len 32 and 2",
        ),
        ({"max_new_tokens": 126}, "--max-new-tokens=126: with --prompt-len 1 and 2"),
        ({"prompt_len": 126}, "--max-new-tokens=1: with --prompt-len 126 and 2"),
        ({"longest_response": 200}, "--longest-response=200: .*context of 128"),
    ],
)
def test_what_was_asked_for_and_does_not_fit_is_refused(lengths, flags, message):
    with pytest.raises(ConfigError, match=message):
        lengths(128, **flags)
