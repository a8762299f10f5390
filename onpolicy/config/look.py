"""The flags of `onpolicy data`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from onpolicy.config.groups.agents import TemplateOptions
from onpolicy.config.groups.reward import RuleName
from onpolicy.config.kinds import Count, Unasked


@dataclass(frozen=True, kw_only=True)
class LookConfig:
    """A first look at prompts before a run: how many, with which fields, how long, what is wrong.

    Says what the chat template makes of row 1. Exit code 1 if a run would refuse a row.
    """

    file: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE", help_behavior_hint="")
    ] = ""
    """A file, a directory of save_to_disk, or reasoning-gym:NAME, as --prompt-data takes it."""

    hf_checkpoint: str = ""
    """Checkpoint whose tokenizer counts tokens, and whose context says which prompts are too long.
    Without it lengths are in characters."""

    input_key: str = "prompt"
    """Field with the prompt."""

    label_key: str = "label"
    """Field with the reference answer."""

    tool_key: str = "tools"
    """Field with the tools of the row's chat template."""

    apply_chat_template: bool = False
    """Turn prompts into chats with the tokenizer's template."""

    chat_template_kwargs: TemplateOptions = "{}"
    """Variables of the chat template as a JSON object."""

    rm_type: Literal["", RuleName] = ""
    """Rule that is to score responses. Labels by which it would call right answers wrong are refused,
    as a run would refuse them."""

    reasoning_gym_size: Count = 100
    """Problems of each dataset of reasoning-gym that are looked at."""

    rollout_max_response_len: Count = Unasked(1024)
    """Longest response that must fit beside a prompt; if not given, at most half of the context."""
