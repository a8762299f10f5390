"""The command `onpolicy data`: statistics of a prompt file."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onpolicy.config.flags import flag_values
from onpolicy.config.groups import DataConfig, RewardConfig
from onpolicy.config.groups.reward_flags import RuleName
from onpolicy.config.tool_flags import LookConfig
from onpolicy.errors import ConfigError
from onpolicy.images.placing import ImagePlacer
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.engine_args import CONTEXT_MARGIN
from onpolicy.rollout.prompts import RowReader, identity, rows_of
from onpolicy.rollout.row_images import folder_of
from onpolicy.system.hub import data_path
from onpolicy.types import Prompt

QUANTILES = (0, 0.5, 0.9, 0.99, 1)
NO_LIMIT = 2**62


@dataclass(kw_only=True)
class Found:
    """The statistics of a file's rows."""

    unit: str
    """The unit of the lengths: tokens or characters."""

    longest: int = NO_LIMIT
    """The number of tokens of the longest prompt that a run accepts."""

    num_rows: int = 0
    keys: Counter[str] = field(default_factory=Counter)
    """The number of rows that have each field."""

    lengths: list[int] = field(default_factory=list)
    """The length of each prompt that a run accepts, too long ones included."""

    duplicates: int = 0
    """The number of rows that a run leaves out: policy and reward cannot tell them from earlier ones."""

    unlabelled: int = 0
    """The number of rows without a label, which rules such as math need."""

    too_long: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    first: str = ""
    """The text of the first prompt, as it is tokenised."""

    def told(self) -> str:
        """Return the statistics as text, one line each."""
        count = self.num_rows
        keys = ", ".join(k if n == count else f"{k} (in {n})" for k, n in self.keys.items())
        lines = {"rows": f"{count}", "fields": keys, "duplicates": f"{self.duplicates}"}
        if self.unlabelled:
            lines["no label"] = f"{self.unlabelled}; --rm-type math, dapo and exact need one"
        if lengths := sorted(self.lengths):
            at = [lengths[round(q * (len(lengths) - 1))] for q in QUANTILES]
            lines[self.unit] = "min {}  median {}  90 % {}  99 % {}  max {}".format(*at)
        if self.longest < NO_LIMIT:
            lines["too long"] = f"{len(self.too_long)} of more than {self.longest} tokens" + (
                f", the first {self.too_long[0]}" if self.too_long else ""
            )
        lines["refused"] = f"{len(self.refused)}"
        for number, message in enumerate(self.refused[:3], 1):
            lines[f"  {number}"] = message
        if self.first:
            lines["row 1"] = repr(self.first)
        return "\n".join(f"{name:<12}{text}" for name, text in lines.items())


def look(config: LookConfig) -> Found:
    """Read every row; note a row that a run would refuse, and continue. Raises ConfigError for a
    file or a checkpoint that cannot be read."""
    found = Found(unit="characters")
    tokenizer: Any = _Characters()
    placer = None
    if config.hf_checkpoint:
        from onpolicy.models.hf_config import load_config  # imports transformers
        from onpolicy.models.tokenizer import load_tokenizer
        from onpolicy.run.launch.input_checks import fit_length

        hf_config = load_config(config.hf_checkpoint)
        context: int = hf_config.max_position_embeddings
        asked = config.rollout_max_response_len
        length = fit_length("--rollout-max-response-len", asked, context // 2, hf_config)
        found = Found(unit="tokens", longest=context - CONTEXT_MARGIN - length)
        tokenizer = load_tokenizer(config.hf_checkpoint)
        placer = ImagePlacer.of(config.hf_checkpoint, tokenizer) if config.images else None
    data, rule = DataConfig(**flag_values(config.rows)), config.rm_type
    reader = RowReader(
        config=data, tokenizer=tokenizer, max_prompt_len=NO_LIMIT, needs_label=bool(rule),
        placer=placer, folder=folder_of(data_path(config.file, "FILE")) if placer else None,
    )  # fmt: skip
    seen: set[int] = set()
    taken: dict[str, Prompt] = {}
    for where, row in rows_of(config.file, data.reasoning_gym_size, 0, "FILE"):
        found.num_rows += 1
        found.keys.update(row.keys())
        try:
            prompt = reader.read(found.num_rows, row, where)
        except ConfigError as error:
            found.refused.append(str(error))
            continue
        if rule:
            taken[where] = replace(
                prompt, prompt_ids=[], text="", metadata={}, messages=None, images=()
            )
        _add(found, prompt, where, seen)
    if rule:
        found.refused += _refused_labels(taken, rule)
    return found


def _refused_labels(prompts: Mapping[str, Prompt], rule: RuleName) -> list[str]:
    """Return a run's error messages for labels; prompts: by their place in the file."""
    places = [*prompts]
    numbered = [replace(prompt, index=i) for i, prompt in enumerate(prompts.values())]
    return [
        f"{places[prompt.index]}: label={prompt.label!r}: --rm-type={rule} cannot read it: {reason}"
        for prompt, _, reason in Scorer(RewardConfig(rm_type=rule)).refused_labels(numbered)
    ]


def _add(found: Found, prompt: Prompt, where: str, seen: set[int]) -> None:
    found.unlabelled += not prompt.label
    if (same := identity(prompt)) in seen:
        found.duplicates += 1
        return
    seen.add(same)
    found.first = found.first or prompt.text
    found.lengths.append(len(prompt.prompt_ids))
    if found.lengths[-1] > found.longest:
        found.too_long.append(where)


class _Characters:
    """A stand-in for a tokenizer: one token for each character."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [0] * len(text)
