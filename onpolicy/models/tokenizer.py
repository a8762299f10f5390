"""The tokenizer of a Hugging Face checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from onpolicy.errors import ConfigError, in_one_line
from onpolicy.models.published import read_config

logger = logging.getLogger(__name__)

PROBE = "Two words,  (x + 1)\n\tend"
"""A text that every published tokenizer of a language model decodes without loss."""


def load_tokenizer(
    path: str, trust_remote_code: bool = False, flag: str = "--hf-checkpoint"
) -> Any:
    """Load the checkpoint's tokenizer.

    Where transformers builds a tokenizer that loses text (Llama's without spaces, for DeepSeek-V3),
    use tokenizer.json as it is.

    Raise ConfigError if there is none, or if transformers cannot read it.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, config=read_config(path, trust_remote_code), trust_remote_code=trust_remote_code
        )
        if _loses_text(tokenizer, Path(path) / "tokenizer.json"):
            logger.warning(
                "%s: transformers makes a %s of the tokenizer, which loses text; tokenizer.json is used "
                "as it is",
                *(path, type(tokenizer).__name__),
            )
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    except ConfigError:
        raise
    except Exception as error:  # its parsers may raise anything
        raise ConfigError(
            f"{flag}={path}: its tokenizer cannot be read ({type(error).__name__}: "
            f"{in_one_line(error)}). Its files are missing or damaged; download them again."
        ) from error
    # For some models transformers makes an empty tokenizer where it finds no file.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ConfigError(
            f"{flag}={path}: its tokenizer has no tokens, so tokenizer.json is likely missing. "
            "Download the checkpoint's tokenizer files too."
        )
    return tokenizer


def _loses_text(tokenizer: Any, file: Path) -> bool:
    """Return whether it loses a text that the tokenizer in the file does not lose."""
    token_ids = tokenizer.encode(PROBE, add_special_tokens=False)
    if tokenizer.decode(token_ids, clean_up_tokenization_spaces=False) == PROBE:
        return False
    if not file.is_file():
        return False
    raw = Tokenizer.from_file(str(file))
    token_ids = raw.encode(PROBE, add_special_tokens=False).ids
    return bool(raw.decode(token_ids, skip_special_tokens=False) == PROBE)
