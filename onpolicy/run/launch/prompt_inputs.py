"""Prompts of a run and of its evaluation sets, read and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from onpolicy.config import TrainConfig
from onpolicy.config.groups import DataConfig, EvalSet
from onpolicy.config.groups.reward import weights_of
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
        self, file: str, flag: str, data: DataConfig | None = None, each: EvalSet | None = None
    ) -> list[Prompt]:
        """Those of a file. each: the set that they are, which may say what scores them."""
        given = self.longest, self.vocab_size, flag, self.config.seed
        prompts = load_prompts(file, data or self.config.data, self.tokenizer, *given)
        if each is not None and each.sources:
            rewards = weights_of(each.rewards)
            prompts = [replace(x, rule=each.rm_type, rewards=rewards) for x in prompts]
        self.scorer.check_labels(prompts, f"{flag}={file}")
        return prompts

    def read_set(self, each: EvalSet) -> EvalPrompts:
        """Those of an evaluation set."""
        # Problems are made by a flag's name: the same ones wherever the set stands.
        flag = "--eval-prompt-data" if is_procedural(each.path) else each.flag
        data = replace(self.config.data, input_key=each.input_key, label_key=each.label_key)
        prompts = self.read(each.path, flag, data, each)
        if each.sources:
            self.scorer.try_out(prompts[0])
        return EvalPrompts(settings=each, prompts=prompts)
