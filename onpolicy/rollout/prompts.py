"""Prompt files: jsonl or parquet, read and checked whole before the first step."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from onpolicy.config.groups import DataConfig
from onpolicy.errors import ConfigError, in_one_line
from onpolicy.system.reading import parse_json, require_file
from onpolicy.types import Prompt

Row = tuple[str, dict[str, Any]]
"""(where it stands, for messages; the fields)"""


def load_prompts(
    path: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_len: int,
    vocab_size: int | None = None,
    flag: str = "--prompt-data",
) -> list[Prompt]:
    """Read all prompts of a file, as `make_prompts` does; `flag` is for messages."""
    rows = read_rows(Path(path), f"{flag}={path}")
    return make_prompts(rows, config, tokenizer, max_prompt_len, vocab_size, f"{flag}={path}")


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
        text, prompt_ids = _tokenize(content, config.apply_chat_template, tokenizer, where)
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
                index=len(prompts), prompt_ids=prompt_ids, label=label, text=text, metadata=metadata
            )
        )
    if not prompts:
        raise ConfigError(f"{name}: no rows. Give one with at least one prompt.")
    return prompts


class PromptSource:
    """An endless, seeded sequence of prompts; position k depends on (seed, k) alone."""

    def __init__(self, prompts: list[Prompt], seed: int, shuffle: bool):
        self.prompts, self.seed, self.shuffle = prompts, seed, shuffle

    def at(self, position: int) -> Prompt:
        """The prompt that comes after `position` others."""
        epoch, offset = divmod(position, len(self.prompts))
        if not self.shuffle:
            return self.prompts[offset]
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return self.prompts[order[offset]]


def read_rows(path: Path, name: str) -> Iterator[Row]:
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ConfigError(f"{name}: unknown kind {path.suffix!r}. Known: .jsonl, .parquet.")
    require_file(path, name)
    try:
        yield from readers[path.suffix](path, name)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"{name}: cannot be read ({in_one_line(error)}). Give a .jsonl or .parquet file."
        ) from error


def _read_jsonl(path: Path, name: str) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{name}:{number}"
            try:
                row = parse_json(line.decode("utf-8-sig"))
            except ValueError as error:
                problem = f"not valid JSON ({error})" if line.strip() else "an empty line"
                raise ConfigError(f"{where}: {problem}. Every line must be an object.") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: {type(row).__name__}. Every line must be an object.")
            yield where, row


def _read_parquet(path: Path, name: str) -> Iterator[Row]:
    table = pyarrow.parquet.read_table(path)
    for number, row in enumerate(table.to_pylist(), 1):
        yield f"{name}: row {number}", row


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


def _tokenize(
    content: Any, chat: bool, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[str, list[int]]:
    text = _apply_template(content, tokenizer, where) if chat else content
    try:
        prompt_ids = tokenizer.encode(text, add_special_tokens=not chat)
    except (TypeError, ValueError) as error:  # such as half of a surrogate pair
        raise ConfigError(
            f"{where}: prompt={text!r} cannot be tokenised ({in_one_line(error)}). Correct the row."
        ) from error
    if not prompt_ids:
        raise ConfigError(f"{where}: prompt={text!r} has no tokens. Drop the row.")
    return text, prompt_ids


def _apply_template(content: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError(
            "--apply-chat-template: the checkpoint's tokenizer has no chat template. Leave the "
            "flag out, or add chat_template.jinja to the checkpoint."
        )
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    try:
        return cast(
            str,
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        )
    except Exception as error:  # a template is a program of the checkpoint's
        raise ConfigError(
            f"{where}: the checkpoint's chat template refuses the prompt ({in_one_line(error)}). "
            "Correct the row, or the template."
        ) from error
