"""Training run whose steps are measured: the loop's own steps, taken one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PretrainedConfig

from onpolicy.bench.requests import random_prompts
from onpolicy.config import TrainConfig
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.prompt_order import PromptSource
from onpolicy.rollout.rollouter import Episode, Rollouter, Turns
from onpolicy.run.launch.cluster_engines import MakeEngines
from onpolicy.run.launch.inputs import Inputs, make_contract
from onpolicy.run.loop import begin, take_step
from onpolicy.run.run import Run
from onpolicy.types import Prompt, Sample, SampleGroup

LEARNING_RATE = 1e-6

MORE_STEPS = 8
"""Steps after the measured ones, which are not taken: under a lag the last steps sample less."""


class MeasuredRun(Run):
    """A run that records the times of each of its steps."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.steps: list[dict[str, float]] = []

    def step(self) -> float:
        """Take the next step; return the sampled tokens per second of the whole step."""
        take_step(self, len(self.steps))
        return self.steps[-1]["tokens"] / self.steps[-1]["step"]

    def record(self, step: int, groups: Sequence[SampleGroup], metrics: dict[str, float]) -> None:
        super().record(step, groups, metrics)
        trajectories = [sample.trajectory for group in groups for sample in group.samples]
        lengths = [trajectory.num_sampled for trajectory in trajectories]
        oldest = min(span.version for each in trajectories for span in each.spans)
        self.steps.append({
            "step": metrics["perf/step_time"], "train": metrics["perf/train_time"],
            "drawing": metrics["perf/rollout_time"], "tokens": sum(lengths),
            "push": metrics["perf/weight_sync_time"] + metrics["perf/probe_time"],
            "longest": max(lengths), "lag": step - oldest,
        })  # fmt: skip


class ForcedLengths(Rollouter):
    """A rollouter of single responses, of a length that the seed determines and without stop
    tokens."""

    def __init__(self, length: Callable[[int], int]):
        self._length = length

    async def roll_out(self, prompt: Prompt, turns: Turns) -> Episode:
        request = turns.request
        length = self._length(request.sampling_seed)
        params = replace(request.params, max_new_tokens=length, ignore_eos=True)
        turns.request = replace(request, params=params)
        await turns.sample()
        return Episode()


class EvenTokens(Scorer):
    """A scorer of the share of even tokens, without processes of its own: a signal that random
    weights have."""

    def score(self, groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
        for sample in chain.from_iterable(groups):
            evens = [token % 2 == 0 for token in sample.response_ids]
            sample.reward = sum(evens) / len(evens)
        return {}

    def start(self) -> None:
        """Start nothing."""


@contextmanager
def measured_run(
    config: BenchConfig,
    train_config: TrainConfig,
    hf_config: PretrainedConfig,
    name: str,
    make_engines: MakeEngines,
    rollouter: Rollouter,
    num_steps: int,
) -> Iterator[MeasuredRun]:
    """Yield a run that has begun, in a directory of its name, for `num_steps` steps."""
    made = replace(
        train_config,
        rollout=replace(train_config.rollout, num_rollout=num_steps + MORE_STEPS),
        trainer=replace(train_config.trainer, lr=LEARNING_RATE),
        output=replace(train_config.output, run_dir=str(Path(config.run_dir) / name)),
    )
    inputs = Inputs(
        hf_config=hf_config,
        contract=make_contract(made, hf_config)[0],
        tokenizer=load_tokenizer(config.model.hf_checkpoint, False),
        prompts=PromptSource(random_prompts(config, hf_config.vocab_size), 0, shuffle=False),
        eval_sets={},
        stop_token_ids=(),
    )
    silent = Console(quiet=True)  # several runs take turns, and standard output holds the result
    with MeasuredRun(
        made,
        inputs,
        make_engines=make_engines,
        make_scorer=lambda config: EvenTokens(config),
        rollouter=rollouter,
        console=silent,
    ) as run:
        begin(run)
        yield run
