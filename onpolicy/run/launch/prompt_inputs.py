"""The prompts of a run and of its evaluation sets, read and checked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from onpolicy.config import TrainConfig
from onpolicy.config.groups import DataConfig, EvalSet
from onpolicy.config.groups.agents import has_agent
from onpolicy.config.groups.reward import RULES, is_function, weights_of
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.prompts import Read, load_prompts
from onpolicy.rollout.reasoning_gym import is_procedural
from onpolicy.system.reading import read_text
from onpolicy.types import Prompt


class EvalPrompts(NamedTuple):
    """An evaluation set with its prompts."""

    settings: EvalSet
    prompts: list[Prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """A reader of prompts. Raises ConfigError for one that could not be sampled or scored."""

    config: TrainConfig
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int

    longest: int
    """The most tokens of a prompt."""

    def read(
        self, file: str, flag: str, data: DataConfig | None = None, each: EvalSet | None = None
    ) -> list[Prompt]:
        """Return the prompts of a file. each: its evaluation set, which may name its own rewards."""
        given = self.longest, self.vocab_size, flag, self.config.seed
        sources = each.sources if each is not None and each.sources else self.scorer.sources
        prompts = load_prompts(
            file,
            data or self.config.data,
            self.tokenizer,
            *given,
            read=self._read_of_a_row(sources),
        )
        if each is not None and each.sources:
            rewards = weights_of(each.rewards)
            prompts = [replace(x, rule=each.rm_type, rewards=rewards) for x in prompts]
        self.scorer.check_labels(prompts, f"{flag}={file}")
        return prompts

    def _read_of_a_row(self, sources: Collection[str]) -> Read:
        """Return the fields of a row that these rewards, and the run's agent, read beside its prompt."""
        label = any(name in RULES for name in sources)
        if "judge" in sources:
            file = self.config.reward.judge_prompt
            label |= "{label}" in read_text(Path(file), f"--judge-prompt={file}")
        fields = "remote_rm" in sources or any(map(is_function, sources))
        run = self.config
        return Read(
            label=label,
            fields=fields or has_agent(run.agent) or bool(run.distillation.teacher_key),
        )

    def read_set(self, each: EvalSet) -> EvalPrompts:
        """Return an evaluation set with its prompts."""
        # Problems are seeded by a flag's name, so that they do not depend on where the set is given.
        flag = "--eval-prompt-data" if is_procedural(each.path) else each.flag
        data = replace(self.config.data, input_key=each.input_key, label_key=each.label_key)
        prompts = self.read(each.path, flag, data, each)
        if each.sources:
            self.scorer.try_out(prompts[0])
        return EvalPrompts(settings=each, prompts=prompts)
