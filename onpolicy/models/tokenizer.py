"""The tokenizer of a Hugging Face checkpoint."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from onpolicy.errors import ConfigError, in_one_line
from onpolicy.models.published import read_config


def load_tokenizer(
    path: str, trust_remote_code: bool = False, flag: str = "--hf-checkpoint"
) -> Any:
    """Raises ConfigError if there is none, or if transformers cannot read it."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, config=read_config(path, trust_remote_code), trust_remote_code=trust_remote_code
        )
    except ConfigError:
        raise
    except Exception as error:  # whatever its parsers raise
        raise ConfigError(
            f"{flag}={path}: its tokenizer cannot be read ({type(error).__name__}: "
            f"{in_one_line(error)}). Its files are missing or damaged; download them again."
        ) from error
    # For some models transformers makes up an empty tokenizer where it finds no file.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ConfigError(
            f"{flag}={path}: its tokenizer has no tokens, so tokenizer.json is likely missing. "
            "Download the checkpoint's tokenizer files too."
        )
    return tokenizer
