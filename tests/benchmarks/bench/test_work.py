"""What a benchmark does: lengths fit the model, and that is said; work is that of all repetitions."""

import dataclasses
import logging

import pytest

from benchmarks.bench.work import bench_work, fit_bench
from onpolicy.cli.parse import parse
from onpolicy.config.groups import EngineCountConfig
from onpolicy.config.tools import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.engine_args import CONTEXT_MARGIN
from onpolicy.run.launch.duration import Work


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


def bench(**values):
    return BenchConfig(repetitions=4, num_prompts=6, prompt_len=10, max_new_tokens=20, **values)


def test_a_benchmark_of_rollouts_samples_every_prompt_once_a_repetition():
    work = bench_work(bench(what="rollout"), 2, at_once=3)
    assert work == Work(scored=600, trained=0, decode_steps=2 * 5 * 2 * 20, sampled=1200)


def test_servers_share_what_is_sampled():
    engines = EngineCountConfig(rollout_num_engines=2)
    assert bench_work(bench(what="rollout", engines=engines), 2, at_once=6).sampled == 600


def test_a_benchmark_of_steps_trains_on_every_size():
    work = bench_work(bench(what="step", num_tokens=(100, 300)), 2, at_once=6)
    assert work == Work(scored=0, trained=2 * 5 * 400, decode_steps=0, sampled=0)


def test_a_benchmark_of_loops_trains_on_all_samples_and_scores_them_again_on_stock_operators():
    config = bench(what="loop", n_samples_per_prompt=2)
    work = bench_work(config, 2, at_once=12)
    samples = 12
    assert work.trained == 2 * 5 * samples * 30
    assert work.sampled == 2 * 5 * samples * 20
    assert work.scored == 2 * 5 * 6 * 10 + 5 * samples * 30
    aligned_alone = bench_work(dataclasses.replace(config, longest_response=40), 2, at_once=12)
    assert aligned_alone.scored == 2 * 5 * 6 * 10
