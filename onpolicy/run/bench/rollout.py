"""`onpolicy bench rollout`: whole SGLang servers."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from onpolicy.config.tools import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.base import SamplingJob
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.run.bench.alternate import Measure, alternate
from onpolicy.run.bench.setting import KINDS, setting, settings
from onpolicy.run.engine_specs import make_rollout_group
from onpolicy.types import Request, SamplingParams


def bench_rollout(config: BenchConfig) -> dict[str, Any]:
    """Tokens per second of a whole SGLang server, for each kind of operators."""
    hf_config = load_config(config.model.hf_checkpoint)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(hf_config.vocab_size) for _ in range(config.prompt_len)]
        for _ in range(config.num_prompts)
    ]
    with ExitStack() as on_exit:
        measures: dict[str, Measure] = {}
        for kind in KINDS:
            train_config, contract = setting(config, hf_config, kind)
            logs = Path(config.run_dir) / kind
            longest = config.prompt_len + config.max_new_tokens
            group = make_rollout_group(train_config, hf_config, contract, logs, longest)
            on_exit.callback(group.stop)
            group.launch()
            group.connect({})
            measures[kind] = _rollout_measure(group, prompts, config.max_new_tokens)
        return {
            "what": "rollout",
            "unit": "sampled tokens per second",
            **alternate(measures, config.repetitions),
            **settings(config),
        }


def _rollout_measure(group: Any, prompts: list[list[int]], max_new_tokens: int) -> Measure:
    params = SamplingParams(
        temperature=1.0, max_new_tokens=max_new_tokens, stop_token_ids=(), ignore_eos=True
    )
    requests = [
        Request(prompt_ids=prompt, sampling_seed=sampling_seed("bench", i), params=params)
        for i, prompt in enumerate(prompts)
    ]

    def measure() -> float:
        for client in group.clients:
            client.flush_cache()
        started = time.perf_counter()
        group.generate(SamplingJob(requests))
        return len(requests) * max_new_tokens / (time.perf_counter() - started)

    return measure
