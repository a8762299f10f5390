"""`onpolicy bench loop`: whole steps of reinforcement learning, from the requests to the push."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from transformers import PretrainedConfig

from onpolicy.config.tools import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.sampling import group_samples, make_requests, require_version
from onpolicy.run.bench.alternate import alternate
from onpolicy.run.bench.requests import random_prompts, sampling_params
from onpolicy.run.bench.setting import KINDS, backends, setting, settings
from onpolicy.run.cluster import MakeEngines, on_cluster
from onpolicy.run.engines import EnginePair
from onpolicy.run.train_samples import make_train_samples
from onpolicy.types import Completion, SampleGroup

LEARNING_RATE = 1e-6

PHASES = ("rollout", "train", "push")


def bench_loop(config: BenchConfig) -> dict[str, Any]:
    """Sampled tokens per second of whole steps, for each kind of operators, and what each phase took.

    Stock engines do what their mismatch asks for: the trainer computes the log-probabilities of the
    samples once more, and weighs them by token (--use-tis).
    """
    hf_config = load_config(config.model.hf_checkpoint)
    backend = backends(config)[0]
    with (
        on_cluster(*setting(config, hf_config, "aligned", backend)) as make_engines,
        ExitStack() as on_exit,
    ):
        loops = {
            kind: on_exit.enter_context(started_loop(config, hf_config, kind, make_engines))
            for kind in KINDS
        }
        result = alternate({kind: loop.step for kind, loop in loops.items()}, config.repetitions)
        for kind, loop in loops.items():
            result[kind]["seconds"] = loop.median_seconds()
    return {"what": "loop", "unit": "sampled tokens per second", **result, **settings(config)}


class Loop:
    """The two engines of one kind, and the same step again and again."""

    def __init__(self, config: BenchConfig, vocab_size: int, engines: EnginePair):
        self.engines, self._num_steps = engines, 0
        self._algorithm = engines.config.algorithm
        self._prompts = random_prompts(config, vocab_size)
        self._params = sampling_params(config)
        self._seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def step(self) -> float:
        """Sample, score, train, push; sampled tokens per second of it all."""
        started = time.perf_counter()
        groups = self._roll_out()
        rolled_out = time.perf_counter()
        self.engines.trainer.train(
            make_train_samples(groups, self._algorithm), self._num_steps, [LEARNING_RATE]
        )
        trained = time.perf_counter()
        self.push()
        ends = (started, rolled_out, trained, time.perf_counter())
        for phase, begin, end in zip(PHASES, ends, ends[1:], strict=False):
            self._seconds[phase].append(end - begin)
        tokens = sum(len(s.rollout_log_probs) for group in groups for s in group.samples)
        return tokens / (ends[-1] - started)

    def push(self) -> None:
        self.engines.push_weights(str(self._num_steps))
        self._num_steps += 1

    def _roll_out(self) -> list[SampleGroup]:
        rollout = self.engines.config.rollout
        count, step = rollout.n_samples_per_prompt, self._num_steps
        requests = make_requests(self._prompts, count, self._params, "bench", step)
        completions = self.engines.generate(requests)
        for completion in completions:
            require_version(completion, self.engines.weight_version)
        texts = [""] * len(completions)
        groups = group_samples(self._prompts, completions, texts)
        for sample in (sample for group in groups for sample in group.samples):
            sample.reward = even_share(sample.completion)
        return groups

    def median_seconds(self) -> dict[str, float]:
        """Of each phase; the first step, which warms up, is left out."""
        return {phase: median(seconds[1:]) for phase, seconds in self._seconds.items()}


@contextmanager
def started_loop(
    config: BenchConfig,
    hf_config: PretrainedConfig,
    kind: str,
    make_engines: MakeEngines = EnginePair,
) -> Iterator[Loop]:
    """Engines of one kind with the checkpoint's weights in both; they end afterwards."""
    train_config, contract = setting(config, hf_config, kind, backends(config)[0])
    engines = make_engines(
        train_config,
        hf_config,
        contract,
        Path(config.run_dir) / kind,
        longest_sequence=config.prompt_len + config.max_new_tokens,
    )
    try:
        engines.start()
        loop = Loop(config, hf_config.vocab_size, engines)
        loop.push()
        yield loop
    finally:
        engines.stop()


def even_share(completion: Completion) -> float:
    """The share of even tokens: a signal that random weights have."""
    evens: Sequence[bool] = [token % 2 == 0 for token in completion.response_ids]
    return sum(evens) / len(evens)
