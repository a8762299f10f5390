"""Schedules side by side, on engines in memory: each draws the same lengths, as it is to."""

from statistics import median

import pytest

from onpolicy.bench.input_checks import check_inputs
from onpolicy.bench.schedules import WARM_UP, drawn_length, schedules, started, summed
from onpolicy.config import groups
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.training import distributed
from tests.support.engines_in_memory import Host
from tests.support.tiny_policy import VOCAB_SIZE
from tests.support.trainer_in_memory import pair_maker

STEPS = WARM_UP + 3


def bench(checkpoint, directory, **values):
    return BenchConfig(
        what="loop", model=groups.CheckpointConfig(hf_checkpoint=str(checkpoint)), num_prompts=3,
        n_samples_per_prompt=4, prompt_len=2, run_dir=str(directory),
        **{"max_new_tokens": 3, "longest_response": 9, **values},
    )  # fmt: skip


def seeds_of(run, step):
    """Those of a rollout's requests, in the order of the prompts."""
    groups = [run.sampler.open_group(3 * step + i) for i in range(3)]
    return [e.turns.request.sampling_seed for group in groups for e in group]


def test_lengths_are_long_tailed_and_a_request_has_its_own(tmp_path):
    config = bench("m", tmp_path, max_new_tokens=64, longest_response=1024)
    lengths = [drawn_length(config, i) for i in range(2000)]
    assert 58 < median(lengths) < 70 and max(lengths) == 1024 and min(lengths) >= 1
    assert lengths == [drawn_length(config, i) for i in range(2000)]


@pytest.mark.parametrize("name", schedules(bench("m", "d")))
def test_a_schedule_is_measured_on_responses_of_the_lengths_that_their_requests_have(
    checkpoint, tmp_path, name
):
    distributed.init_process_group()
    config, trained = bench(checkpoint, tmp_path), []
    hf_config = load_config(str(checkpoint))
    hf_config.vocab_size = VOCAB_SIZE
    with started(config, hf_config, name, pair_maker(Host())) as run:
        learn = run.engines.trainer.train

        def train(samples, *rest):
            trained.append([*samples])
            return learn(samples, *rest)

        run.engines.trainer.train = train
        for _ in range(STEPS):
            run.step()
    result = summed(run.steps[WARM_UP:])
    assert len(result["step_seconds"]) == 3 and result["tokens_per_second"] > 0
    parts = zip(
        result["train_seconds"], result["push_seconds"], result["step_seconds"], strict=True
    )
    assert all(0 <= train + push < step for train, push, step in parts)
    assert min(result["drawing_seconds"]) >= 0 and max(result["longest_responses"]) <= 9
    assert result["rollout_busy_share"] > 0 and 0 <= result["trainer_busy_share"] < 1
    assert [len(samples) for samples in trained] == [12] * STEPS
    if name in ("lag 0", "lag 1"):
        for step, samples in enumerate(trained):
            lengths = [drawn_length(config, seed) for seed in seeds_of(run, step)]
            assert [len(sample.response_ids) for sample in samples] == lengths
    if name == "lag 1":
        assert result["longest_lag"] == 1


def test_a_longest_response_that_does_not_fit_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"--longest-response=5000: .*does not fit"):
        check_inputs(bench(checkpoint, tmp_path, longest_response=5000))
