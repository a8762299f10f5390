"""The tokens that end a response, from the checkpoint's files and the user's flag."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from onpolicy.errors import ConfigError
from onpolicy.system.reading import read_json_object


def stop_token_ids(
    path: str, hf_config: PretrainedConfig, extra: Sequence[int] = ()
) -> tuple[int, ...]:
    """The checkpoint's end-of-sequence tokens and `extra`, in order.

    Raises ConfigError for a token that the model does not have.
    """
    ids = set(_require_tokens("--rollout-stop-token-ids", extra, hf_config))
    name = f"--hf-checkpoint={path}"
    ids |= _require_tokens(f"{name}: config.json: eos_token_id", hf_config.eos_token_id, hf_config)
    file = Path(path) / "generation_config.json"
    if file.is_file():
        eos = read_json_object(file, f"{name}: {file.name}").get("eos_token_id")
        ids |= _require_tokens(f"{name}: {file.name}: eos_token_id", eos, hf_config)
    return tuple(sorted(ids))


def _require_tokens(name: str, tokens: Any, config: PretrainedConfig) -> set[int]:
    """The tokens that `name`, a flag or a field of a file, gives: one, several, or None."""
    given = list(tokens) if isinstance(tokens, (list, tuple)) else [tokens] * (tokens is not None)
    for token in given:
        if not isinstance(token, int) or not 0 <= token < config.vocab_size:
            raise ConfigError(
                f"{name}={token!r}: the model's tokens are 0 to {config.vocab_size - 1}. Correct it."
            )
    return set(given)
