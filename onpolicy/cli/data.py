"""The command `onpolicy data FILE`."""

from collections.abc import Sequence

from onpolicy.cli.command import with_commits
from onpolicy.cli.parse import parse
from onpolicy.config.rules import require_ranges
from onpolicy.config.tool_flags import LookConfig
from onpolicy.errors import ConfigError, visible


def main(argv: Sequence[str]) -> int:
    """Read all rows, and print their statistics."""
    config = parse(LookConfig, argv, "onpolicy data")
    require_ranges(config)
    if not config.file:
        raise ConfigError("FILE is missing. Give the path of prompts.")
    if config.images and not config.hf_checkpoint:
        raise ConfigError("--images: a checkpoint's processor reads them. Add --hf-checkpoint DIR.")
    if config.rows.apply_chat_template and not config.hf_checkpoint:
        raise ConfigError(
            "--apply-chat-template: the template is the tokenizer's. Add --hf-checkpoint DIR."
        )

    from onpolicy.run.commands.prompt_statistics import look

    found = look(with_commits(config))
    print(visible(found.told()))
    return 1 if found.refused or found.too_long else 0
