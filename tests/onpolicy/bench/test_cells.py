"""What `bench decode` measures: what was asked for, or the usual contexts, as far as they fit."""

import dataclasses

import pytest
from transformers import Qwen3Config

from onpolicy.bench.cells import CONTEXT_LENS, Cell, cells, fit_decode
from onpolicy.config.tool_flags import BenchConfig

DECODE = BenchConfig(what="decode", batch_sizes=(1, 4), max_new_tokens=10)


def model(context):
    return Qwen3Config(max_position_embeddings=context)


def test_the_usual_contexts_are_taken_where_one_fits_and_a_short_one_elsewhere():
    assert fit_decode(DECODE, model(9000)).context_lens == CONTEXT_LENS
    small = fit_decode(DECODE, model(128))
    assert small.context_lens == (32,) and small.prompt_len == 32


def test_servers_are_made_for_the_most_and_the_longest_prompts_that_fit():
    fitted = fit_decode(DECODE, model(9000))
    assert (fitted.num_prompts, fitted.prompt_len) == (4, 8192)


@pytest.mark.parametrize("spare, holds", [(0, True), (-1, False)])
def test_a_batch_is_measured_if_the_cache_holds_every_token_of_it(spare, holds):
    config = dataclasses.replace(DECODE, context_lens=(32,))
    needed = 4 * (32 + 10 + 8)
    fitting, others = cells(config, 128, needed + spare)
    assert (Cell(4, 32) in fitting) == holds
    assert [other["batch_size"] for other in others] == [4] * (not holds)
