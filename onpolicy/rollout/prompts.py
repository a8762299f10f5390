"""Rows of prompt files made prompts, all of them checked before the first step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from onpolicy.config.groups import DataConfig
from onpolicy.errors import ConfigError, in_one_line
from onpolicy.rollout import reasoning_gym
from onpolicy.rollout.data_files import Row, read_rows
from onpolicy.system.reading import parse_json
from onpolicy.types import Prompt


def load_prompts(
    path: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_len: int,
    vocab_size: int | None = None,
    flag: str = "--prompt-data",
    seed: int = 0,
) -> list[Prompt]:
    """Read all prompts of a file, or have them made, as `make_prompts` does.

    `flag` is for messages; it and `seed` decide what problems are made.
    """
    given = tokenizer, max_prompt_len, vocab_size, f"{flag}={path}"
    rows = rows_of(path, config.reasoning_gym_size, seed, flag)
    if not reasoning_gym.is_procedural(path):
        return make_prompts(rows, config, *given)
    made = make_prompts(rows, DataConfig(apply_chat_template=config.apply_chat_template), *given)
    return [replace(prompt, rule="reasoning_gym") for prompt in made]


def rows_of(source: str, size: int, seed: int, flag: str) -> Iterator[Row]:
    """The rows of a file, or the problems of a source that makes them: `size` of each dataset."""
    if reasoning_gym.is_procedural(source):
        return reasoning_gym.rows_of(source, size, seed, flag)
    return read_rows(Path(source), f"{flag}={source}")


def make_prompts(
    rows: Iterable[Row],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_len: int,
    vocab_size: int | None,
    name: str,
) -> list[Prompt]:
    """The prompts in rows that `name` has, in their order, without duplicates.

    Takes rows of `{prompt, label}` and the columns of verl's data sets (`prompt` as chat messages,
    `reward_model.ground_truth`). A row that repeats an earlier prompt and label is dropped
    (DAPO-Math-17k on the hub holds every problem about a hundred times). Raises ConfigError with
    where the first row stands that cannot be used, be it for a token beyond the model's `vocab_size`.
    """
    prompts: list[Prompt] = []
    seen: set[tuple[str, str]] = set()
    for where, row in rows:
        content = field_of(row, config.input_key, where)
        _require_prompt(content, config.apply_chat_template, where)
        label = _label(row, config.label_key, where)
        if (key := (json.dumps(content, sort_keys=True, default=str), label)) in seen:
            continue
        seen.add(key)
        tools = _tools(row, config, where)
        text, prompt_ids = _tokenize(content, tools, config.apply_chat_template, tokenizer, where)
        if len(prompt_ids) > max_prompt_len:
            raise ConfigError(
                f"{where}: the prompt has {len(prompt_ids)} tokens; with the longest response it may "
                f"have {max_prompt_len}, so that both fit the model's context. Drop the row, or "
                "lower --rollout-max-response-len."
            )
        if vocab_size is not None and max(prompt_ids) >= vocab_size:
            raise ConfigError(
                f"{where}: the prompt has the token {max(prompt_ids)}, and the model's vocab_size is "
                f"{vocab_size}. The tokenizer is another model's; download the checkpoint again."
            )
        metadata = {k: v for k, v in row.items() if k not in (config.input_key, config.label_key)}
        prompts.append(
            Prompt(
                index=len(prompts),
                prompt_ids=prompt_ids,
                label=label,
                text=text,
                metadata=metadata,
                messages=_messages(content) if config.apply_chat_template else None,
            )
        )
    if not prompts:
        raise ConfigError(f"{name}: no rows. Give one with at least one prompt.")
    return prompts


def field_of(row: dict[str, Any], key: str, where: str) -> Any:
    """The value under a key; a dotted key reaches into objects."""
    value: Any = row
    for part in [key] if key in row else key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ConfigError(
                f"{where}: no field {key!r}; the row has {', '.join(sorted(row))}. Set --input-key "
                "and --label-key to the names in the file."
            )
        value = value[part]
    return value


def _label(row: dict[str, Any], key: str, where: str) -> str:
    if key == "label" and "label" not in row and "reward_model" in row:
        key = "reward_model.ground_truth"
    value = field_of(row, key, where)
    is_missing = value is None or value != value  # NaN stands for a missing number in parquet
    if is_missing or isinstance(value, (dict, list, bytes)):
        raise ConfigError(f"{where}: {key}={value!r}. A label must be a string or a number.")
    return str(value)


def _require_prompt(content: Any, chat: bool, where: str) -> None:
    if isinstance(content, list) and not chat:
        raise ConfigError(
            f"{where}: the prompt is a list of chat messages. Add --apply-chat-template."
        )
    if not isinstance(content, (str, list)) or not content:
        raise ConfigError(f"{where}: prompt={content!r}. It must be text or chat messages.")
    if isinstance(content, list) and not all(isinstance(m, dict) and "role" in m for m in content):
        raise ConfigError(
            f"{where}: prompt={content!r}. Chat messages are objects with a role and a content."
        )


def _tools(row: dict[str, Any], config: DataConfig, where: str) -> list[dict[str, Any]]:
    """The tools that the row's template is given; none of a row without any."""
    value = row.get(config.tool_key) if config.apply_chat_template else None
    try:
        tools = parse_json(value) if isinstance(value, str) and value else value or []
    except ValueError:
        tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(
            f"{where}: {config.tool_key}={value!r:.80}: tools must be a list of JSON schemas, or its "
            "JSON as text. Correct the row, or set --tool-key to another name if these are no tools."
        )
    return [_without_none(tool) for tool in tools]


def _without_none(value: Any) -> Any:
    """Less what a column of Arrow's fills in: each of its objects has the fields of all others."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


def _tokenize(
    content: Any,
    tools: list[dict[str, Any]],
    chat: bool,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
) -> tuple[str, list[int]]:
    text = _apply_template(content, tools, tokenizer, where) if chat else content
    try:
        prompt_ids = tokenizer.encode(text, add_special_tokens=not chat)
    except (TypeError, ValueError) as error:  # such as half of a surrogate pair
        raise ConfigError(
            f"{where}: prompt={text!r} cannot be tokenised ({in_one_line(error)}). Correct the row."
        ) from error
    if not prompt_ids:
        raise ConfigError(f"{where}: prompt={text!r} has no tokens. Drop the row.")
    return text, prompt_ids


def _messages(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"role": "user", "content": content}]


def _apply_template(
    content: Any, tools: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, where: str
) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError(
            "--apply-chat-template: the checkpoint's tokenizer has no chat template. Leave the "
            "flag out, or add chat_template.jinja to the checkpoint."
        )
    messages = _messages(content)

    def render(tools: list[dict[str, Any]] | None) -> str:
        more: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        return cast(str, tokenizer.apply_chat_template(messages, tools=tools, **more))  # type: ignore[arg-type]

    try:
        text, bare = render(tools or None), render(None) if tools else ""
    except Exception as error:  # a template is a program of the checkpoint's
        raise ConfigError(
            f"{where}: the checkpoint's chat template refuses the prompt ({in_one_line(error)}). "
            "Correct the row, or the template."
        ) from error
    if text == bare:
        raise ConfigError(
            f"{where}: has tools, and the checkpoint's chat template writes none of them. Take a "
            "checkpoint whose template knows tools, or set --tool-key to a field that no row has."
        )
    return text
