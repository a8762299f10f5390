"""The tokens that end a response: one set for train, eval, sft, the gateway and serve."""

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from onpolicy.chat.turn_ends import TurnEnds, turn_ends
from onpolicy.config import TrainConfig
from onpolicy.config.groups.agent_flags import has_gateway
from onpolicy.errors import ConfigError
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.system.files import read_json_object

logger = logging.getLogger(__name__)

_OF_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""The tokenizer files, of which a checkpoint with a tokenizer has at least one."""


def stop_token_ids(
    path: str,
    hf_config: PretrainedConfig,
    extra: Sequence[int] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    of_chats: bool = True,
) -> tuple[int, ...]:
    """Return the tokens that end a response, sorted.

    They are the `eos_token_id` of config.json and of generation_config.json; the tokenizer's
    end-of-sequence token, which SGLang adds where it serves text and which `sft` teaches after a text;
    and in chats the tokens with which the chat template ends an assistant's turn. Tokens that neither
    file lists are logged.

    path: the checkpoint, whose tokenizer is read unless `tokenizer` is given.
    extra: the user's own tokens.
    of_chats: whether prompts go through the chat template.
    Raises ConfigError for a token that the model does not have."""
    name, file = f"--hf-checkpoint={path}", Path(path) / "generation_config.json"
    own = _require_tokens("--rollout-stop-token-ids", extra, hf_config)
    ids = _require_tokens(f"{name}: config.json: eos_token_id", hf_config.eos_token_id, hf_config)
    if file.is_file():
        eos = read_json_object(file, f"{name}: {file.name}").get("eos_token_id")
        ids |= _require_tokens(f"{name}: {file.name}: eos_token_id", eos, hf_config)
    if tokenizer is None and any((Path(path) / each).is_file() for each in _OF_TOKENIZERS):
        tokenizer = load_tokenizer(path)
    if tokenizer is not None:
        more = _ends_of_tokenizer(tokenizer, name, hf_config, of_chats)
        for how, tokens in more.items():
            if unlisted := tokens - ids - own:
                _warn(
                    f"{name}: eos_token_id of config.json and generation_config.json does not list "
                    f"{_shown(tokenizer, unlisted)}, with which {how}: responses end there too. List it "
                    "in generation_config.json, so that other tools know it."
                )
        ids |= set().union(*more.values())
    if not ids | own:
        _warn(
            f"{name}: no token ends a response, so each goes on to its longest length. Put the model's "
            "end-of-sequence token into generation_config.json as eos_token_id."
        )
    return tuple(sorted(ids | own))


def stop_tokens_of(
    config: TrainConfig, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Return the tokens that end a response of a run, whose prompts are chats or text."""
    path, own = config.model.hf_checkpoint, config.rollout.rollout_stop_token_ids
    of_chats = config.data.apply_chat_template or has_gateway(config.agent)
    ids = stop_token_ids(path, hf_config, own, tokenizer, of_chats=of_chats)
    ends = turn_ends(tokenizer) or TurnEnds()
    if not of_chats and (left := {*ends.token_ids} - {*ids}):
        logger.info(
            "%s has a chat template, which ends an answer with %s. The prompts are text, so no response "
            "ends there. If they are chats, add --apply-chat-template, or --rollout-stop-token-ids %s.",
            *(path, _shown(tokenizer, left), " ".join(map(str, sorted(left)))),
        )
    return ids


def _ends_of_tokenizer(
    tokenizer: PreTrainedTokenizerBase, name: str, hf_config: PretrainedConfig, of_chats: bool
) -> dict[str, set[int]]:
    """Return the tokens that end a text or a turn, keyed by the words for it in a message."""
    eos = tokenizer.eos_token_id
    of_text = _require_tokens(f"{name}: the tokenizer's eos_token_id", eos, hf_config)
    found = {"the tokenizer ends a text": of_text}
    ends = turn_ends(tokenizer) if of_chats else None
    if ends is None:
        return found
    if ends.text:
        _warn(
            f"{name}: the chat template ends an answer with the text {ends.text[:40]!r}, which is no "
            "token of the tokenizer, so no response ends there. Make it one token of the tokenizer, or "
            "have the template end an answer with the end-of-sequence token."
        )
    of_turns = _require_tokens(f"{name}: the chat template's end", ends.token_ids, hf_config)
    return {**found, "the chat template ends an answer": of_turns - of_text}


def _shown(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int]) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(x)} ({x})" for x in sorted(tokens))


@cache
def _warn(message: str) -> None:
    """Log a message once, although several parts of a run ask for its stop tokens."""
    logger.warning("%s", message)


def _require_tokens(name: str, tokens: Any, config: PretrainedConfig) -> set[int]:
    """Return the tokens given by `name`, a flag or a field of a file: one, several, or None."""
    given = list(tokens) if isinstance(tokens, (list, tuple)) else [tokens] * (tokens is not None)
    for token in given:
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise ConfigError(
                f"{name}={token!r}: the model's tokens are 0 to {config.vocab_size - 1}. Correct it."
            )
    return set(given)
