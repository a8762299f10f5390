"""Prompt files: jsonl or parquet, read and checked whole before the first step."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from onpolicy.config.groups import DataConfig
from onpolicy.errors import ConfigError
from onpolicy.types import Prompt

Row = tuple[str, dict[str, Any]]
"""(where it stands, for messages; the fields)"""


def load_prompts(
    path: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase, max_prompt_len: int
) -> list[Prompt]:
    """Read all prompts of a file, in its order, without duplicates.

    Takes rows of `{prompt, label}` and the columns of verl's data sets (`prompt` as chat messages,
    `reward_model.ground_truth`). A row that repeats an earlier prompt and label is dropped
    (DAPO-Math-17k on the hub holds every problem about a hundred times). Raises ConfigError with
    the file and line of the first row that cannot be used.
    """
    prompts: list[Prompt] = []
    seen: set[tuple[str, str]] = set()
    for where, row in _read_rows(Path(path)):
        content = _field(row, config.input_key, where)
        label = _label(row, config.label_key, where)
        if (key := (json.dumps(content, sort_keys=True), label)) in seen:
            continue
        seen.add(key)
        text, token_ids = _tokenize(content, config.apply_chat_template, tokenizer, where)
        if len(token_ids) > max_prompt_len:
            raise ConfigError(
                f"{where}: the prompt has {len(token_ids)} tokens; with the longest response it may "
                f"have {max_prompt_len}, so that both fit the model's context. Drop the row, or "
                "lower --rollout-max-response-len."
            )
        metadata = {k: v for k, v in row.items() if k not in (config.input_key, config.label_key)}
        prompts.append(
            Prompt(
                index=len(prompts), token_ids=token_ids, label=label, text=text, metadata=metadata
            )
        )
    if not prompts:
        raise ConfigError(f"{path}: no rows. Give a file with at least one prompt.")
    return prompts


class PromptSource:
    """An endless, seeded sequence of prompts; position k depends on (seed, k) alone."""

    def __init__(self, prompts: list[Prompt], seed: int, shuffle: bool):
        self.prompts, self.seed, self.shuffle = prompts, seed, shuffle

    def batch(self, step: int, size: int) -> list[Prompt]:
        """The prompts of rollout number `step`."""
        return [self._at(position) for position in range(step * size, (step + 1) * size)]

    def _at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self.prompts))
        if not self.shuffle:
            return self.prompts[offset]
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return self.prompts[order[offset]]


def _read_rows(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Give the path of a .jsonl or .parquet file.")
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path)
    elif path.suffix == ".parquet":
        yield from _read_parquet(path)
    else:
        raise ConfigError(f"{path}: unknown kind {path.suffix!r}. Known: .jsonl, .parquet.")


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                problem = f"not valid JSON ({error})" if line.strip() else "an empty line"
                raise ConfigError(f"{where}: {problem}. Every line must be an object.") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: {type(row).__name__}. Every line must be an object.")
            yield where, row


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable parquet file ({error}).") from error
    for number, row in enumerate(table.to_pylist(), 1):
        yield f"{path}: row {number}", row


def _field(row: dict[str, Any], key: str, where: str) -> Any:
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
    value = _field(row, key, where)
    if value is None or isinstance(value, (dict, list)):
        raise ConfigError(f"{where}: {key}={value!r}. A label must be a string or a number.")
    return str(value)


def _tokenize(
    content: Any, chat: bool, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[str, list[int]]:
    if isinstance(content, list) and not chat:
        raise ConfigError(
            f"{where}: the prompt is a list of chat messages. Add --apply-chat-template."
        )
    if not isinstance(content, (str, list)) or not content:
        raise ConfigError(f"{where}: prompt={content!r}. It must be text or chat messages.")
    text: Any = content
    if chat:
        if tokenizer.chat_template is None:
            raise ConfigError(
                "--apply-chat-template: the checkpoint's tokenizer has no chat template. Leave the "
                "flag out, or add chat_template.jinja to the checkpoint."
            )
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    token_ids = tokenizer.encode(text, add_special_tokens=not chat)
    if not token_ids:
        raise ConfigError(f"{where}: prompt={text!r} has no tokens.")
    return text, token_ids
