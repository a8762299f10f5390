"""`onpolicy data FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from onpolicy.cli.parse import parse
from onpolicy.config.kinds import Count, Unasked
from onpolicy.config.rules import require_ranges
from onpolicy.errors import ConfigError


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

    reasoning_gym_size: Count = 100
    """Problems of each dataset of reasoning-gym that are looked at."""

    rollout_max_response_len: Count = Unasked(1024)
    """Longest response that must fit beside a prompt; if not given, at most half of the context."""


def main(argv: Sequence[str]) -> int:
    """Read all rows, and print what is to be said of them."""
    config = parse(LookConfig, argv, "onpolicy data")
    require_ranges(config)
    if not config.file:
        raise ConfigError("FILE is missing. Give the path of prompts.")
    if config.apply_chat_template and not config.hf_checkpoint:
        raise ConfigError(
            "--apply-chat-template: the template is the tokenizer's. Add --hf-checkpoint DIR."
        )

    from onpolicy.run.commands.data import look

    found = look(config)
    print(found.told())
    return 1 if found.refused or found.too_long else 0
