"""Prompts of a run and of its evaluation sets, read and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from onpolicy.config import TrainConfig
from onpolicy.config.groups import DataConfig, EvalSet
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.prompts import load_prompts
from onpolicy.rollout.reasoning_gym import is_procedural
from onpolicy.types import Prompt


class EvalPrompts(NamedTuple):
    """An evaluation set that was read."""

    settings: EvalSet
    prompts: list[Prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """Reads prompts. Raises ConfigError for the first that could not be sampled or scored."""

    config: TrainConfig
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int

    longest: int
    """Tokens of a prompt, at most."""

    def read(
        self, file: str, flag: str, data: DataConfig | None = None, rule: str = ""
    ) -> list[Prompt]:
        """Those of a file. rule: what scores them, if they do not bring a rule of their own."""
        given = self.longest, self.vocab_size, flag, self.config.seed
        prompts = load_prompts(file, data or self.config.data, self.tokenizer, *given)
        prompts = [replace(prompt, rule=rule or prompt.rule) for prompt in prompts]
        self.scorer.check_labels(prompts, f"{flag}={file}")
        return prompts

    def read_set(self, each: EvalSet) -> EvalPrompts:
        """Those of an evaluation set."""
        flag, rule = each.flag, each.rm_type
        if is_procedural(each.path):
            # Made by a flag's name: the same problems wherever the set stands.
            flag, rule = "--eval-prompt-data", ""
        data = replace(self.config.data, input_key=each.input_key, label_key=each.label_key)
        prompts = self.read(each.path, flag, data, rule)
        if rule:
            self.scorer.try_out(prompts[0])
        return EvalPrompts(settings=each, prompts=prompts)
