"""Conversion of prompt file rows into prompts, all checked before the first step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property, partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from onpolicy.chat.messages import images_of, read_chat, read_tools
from onpolicy.chat.rendering import NO_TEMPLATE
from onpolicy.chat.template import ChatTemplate, make_template, text_ids
from onpolicy.config.groups import DataConfig, template_options
from onpolicy.errors import ConfigError, in_one_line
from onpolicy.images.placing import ImagePlacer, SeenImage
from onpolicy.rollout import generated_prompts
from onpolicy.rollout.data_files import Row, read_rows
from onpolicy.rollout.row_images import FIELDS, RowImages, folder_of, sendable
from onpolicy.system.hub import data_path
from onpolicy.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The columns of a row that a run reads beside its prompt."""

    label: bool = True
    """Whether the label is required; otherwise a row may have none, and its label is empty."""

    fields: bool = True
    """Whether a reward or an agent gets the other fields, so that they distinguish rows."""


EVERYTHING = Read()

MEDIA = (*FIELDS, "videos", "audios")
"""Fields of rows in which data sets for models that see or hear give what a prompt refers to."""

ADD_IMAGES = "With --images a gemma3 or qwen3_vl reads images."

ROW_NAMES = {"index", "idx", "id", "uid", "uuid", "row_id", "__index_level_0__"}
"""The fields that only name a row, ignored in the search for duplicates; pandas writes the last."""


def load_prompts(
    path: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_len: int,
    vocab_size: int | None = None,
    flag: str = "--prompt-data",
    seed: int = 0,
    read: Read = EVERYTHING,
    placer: ImagePlacer | None = None,
) -> list[Prompt]:
    """Load all prompts of a file, or generate them, as `make_prompts` does.

    `flag` is for messages; it and `seed` determine the generated problems.
    """
    given = tokenizer, max_prompt_len, vocab_size, f"{flag}={path}"
    rows = rows_of(path, config.reasoning_gym_size, seed, flag)
    if not generated_prompts.is_procedural(path):
        folder = folder_of(data_path(path, flag)) if placer else None
        return make_prompts(rows, config, *given, read, placer, folder)
    made = replace(config, input_key="prompt", label_key="label")
    prompts = make_prompts(rows, made, *given)
    return [replace(prompt, rule="reasoning_gym") for prompt in prompts]


def rows_of(source: str, size: int, seed: int, flag: str) -> Iterator[Row]:
    """Yield the rows of a file, or the problems of a generator: `size` of each dataset."""
    if generated_prompts.is_procedural(source):
        return generated_prompts.rows_of(source, size, seed, flag)
    return read_rows(data_path(source, flag), f"{flag}={source}")


def make_prompts(
    rows: Iterable[Row],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_len: int,
    vocab_size: int | None,
    name: str,
    read: Read = EVERYTHING,
    placer: ImagePlacer | None = None,
    folder: Path | None = None,
) -> list[Prompt]:
    """Return the prompts of the rows of `name`, in their order, without duplicates.

    Takes rows of `{prompt, label}` and the columns of verl's data sets (`prompt` as chat messages,
    `reward_model.ground_truth`). Duplicates are counted in the log (DAPO-Math-17k on the hub holds
    every problem about a hundred times). Raises ConfigError with the position of the first row that
    cannot be used, also for a token beyond the model's `vocab_size`.
    """
    reader = RowReader(
        config=config,
        tokenizer=tokenizer,
        max_prompt_len=max_prompt_len,
        vocab_size=vocab_size,
        needs_label=read.label,
        placer=placer,
        folder=folder,
    )
    prompts: list[Prompt] = []
    seen: set[int] = set()
    num_rows = 0
    for where, row in rows:
        num_rows += 1
        prompt = reader.read(len(prompts), row, where)
        if (same := identity(prompt, read.fields)) not in seen:
            seen.add(same)
            prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{name}: no rows. Give one with at least one prompt.")
    if repeated := num_rows - len(prompts):
        what = f"all fields but {', '.join(sorted(ROW_NAMES))}" if read.fields else "label"
        logger.info(
            "%s: %d of %d rows repeat an earlier one in prompt and %s, and are left out",
            *(name, repeated, num_rows, what),
        )
    return prompts


def identity(prompt: Prompt, with_fields: bool = True) -> int:
    """Return a 128-bit hash of everything that the policy and the reward read: the text with its
    tools and images, the label, and `with_fields` all other fields except names of rows."""
    fields = {key: _unnamed(value) for key, value in prompt.metadata.items()} if with_fields else {}
    images = (image.digest for image in prompt.images)
    same = (prompt.text, prompt.label, _ordered(_unnamed(fields)), *images)
    return xxhash.xxh3_128_intdigest(repr(same).encode("utf-8", "surrogatepass"))


def _unnamed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: each for key, each in value.items() if key not in ROW_NAMES}


def _ordered(value: Any) -> Any:
    """Return a value that does not depend on the order of its objects' fields."""
    if isinstance(value, dict):
        return sorted((str(key), _ordered(each)) for key, each in value.items())
    return [_ordered(each) for each in value] if isinstance(value, list) else repr(value)


@dataclass(kw_only=True)
class RowReader:
    """A reader that makes a prompt of each row."""

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    max_prompt_len: int
    vocab_size: int | None = None

    needs_label: bool = True
    """Whether a row without a label is refused; otherwise its label is empty."""

    placer: ImagePlacer | None = None
    """The places of images; None: a row with images is refused."""

    folder: Path | None = None
    """The folder of the file, where the paths of images begin; None: there are no paths."""

    def read(self, index: int, row: dict[str, Any], where: str) -> Prompt:
        """Return the prompt of a row. Raises ConfigError with `where` if there can be none."""
        config, read = self.config, FIELDS if self.placer else ()
        self._require_readable(row, read, where)
        content = field_of(row, config.input_key, where)
        label = self._label(row, where)
        try:
            images = RowImages.of(row, self.placer, self.folder) if self.placer else None
            text, seen, messages = self._text_of(content, row, images, where)
            if images is not None:
                images.end()
            prompt_ids = self._tokens(text, messages is not None, where)
            placed = self.placer.placed(prompt_ids, seen) if self.placer else ()
        except ConfigError:
            raise
        except ValueError as error:  # of an image
            raise ConfigError(f"{where}: {in_one_line(error)}. Correct the row.") from error
        self._require_short(prompt_ids, where)
        return Prompt(
            index=index,
            prompt_ids=prompt_ids,
            label=label,
            text=self.placer.shown(text) if self.placer else text,
            metadata={
                k: v for k, v in row.items() if k not in (config.input_key, config.label_key, *read)
            },
            messages=sendable(messages),
            images=placed,
        )

    def _require_readable(self, row: dict[str, Any], read: Sequence[str], where: str) -> None:
        if given := [field for field in MEDIA if row.get(field) and field not in read]:
            kinds = "text and images" if read else "text"
            raise ConfigError(
                f"{where}: has {given[0]}, and a run reads and trains {kinds} alone, also of a model "
                "that sees more. Drop the row, or the field if the prompt makes sense without it."
                + (f" {ADD_IMAGES}" if given[0] in FIELDS else "")
            )

    def _text_of(
        self, content: Any, row: dict[str, Any], images: RowImages | None, where: str
    ) -> tuple[str, list[SeenImage], list[dict[str, Any]] | None]:
        """Return a prompt's text, its images, and the messages of a chat."""
        if self.config.apply_chat_template:
            messages = self._messages(content, images, where)
            return self._opening(messages, row, where), images_of(messages), messages
        text = self._text(content, where)
        return (text, [], None) if images is None else (*images.expanded(text), None)

    def _tokens(self, text: str, is_chat: bool, where: str) -> list[int]:
        encode = self.template.encode if is_chat else partial(text_ids, self.tokenizer)
        try:
            prompt_ids = encode(text)
        except (TypeError, ValueError) as error:  # such as half of a surrogate pair
            raise ConfigError(
                f"{where}: prompt={text!r} cannot be tokenised ({in_one_line(error)}). Correct the row."
            ) from error
        if not prompt_ids:
            raise ConfigError(f"{where}: prompt={text!r} has no tokens. Drop the row.")
        return prompt_ids

    def _opening(self, messages: list[dict[str, Any]], row: dict[str, Any], where: str) -> str:
        tools = tools_of(row, where)
        try:
            return self.template.opening(messages, tools)
        except ValueError as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(
                f"{where}: the checkpoint's chat template refuses the prompt ({reason}). Correct the "
                "row, or the template."
            ) from error

    @cached_property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template, with --chat-template-kwargs."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ConfigError(
                f"--apply-chat-template: {NO_TEMPLATE}. Leave the flag out, or add "
                "chat_template.jinja to the checkpoint."
            )
        options = template_options(self.config.chat_template_kwargs)
        return make_template(self.tokenizer, options=options, placer=self.placer)

    def _messages(self, content: Any, images: RowImages | None, where: str) -> list[dict[str, Any]]:
        try:
            return read_chat(content, images, images.place if images else "")
        except ValueError as error:
            raise ConfigError(
                f"{where}: {self.config.input_key}: {error}. Correct the row, or set --input-key to the "
                f"field with the prompt. {'' if images else ADD_IMAGES}".rstrip()
            ) from error

    def _text(self, content: Any, where: str) -> str:
        if isinstance(content, list):
            raise ConfigError(
                f"{where}: the prompt is a list of chat messages. Add --apply-chat-template."
            )
        if not isinstance(content, str) or not content:
            raise ConfigError(f"{where}: prompt={content!r}. It must be text or chat messages.")
        return content

    def _require_short(self, prompt_ids: list[int], where: str) -> None:
        if len(prompt_ids) > self.max_prompt_len:
            raise ConfigError(
                f"{where}: the prompt has {len(prompt_ids)} tokens; with the longest response it may "
                f"have {self.max_prompt_len}, so that both fit the model's context. Drop the row, or "
                "lower --rollout-max-response-len."
            )
        if self.vocab_size is not None and max(prompt_ids) >= self.vocab_size:
            raise ConfigError(
                f"{where}: the prompt has the token {max(prompt_ids)}, and the model's vocab_size is "
                f"{self.vocab_size}. The tokenizer is another model's; download the checkpoint again."
            )

    def _label(self, row: dict[str, Any], where: str) -> str:
        key = self.config.label_key
        if key == "label" and row.get("label") is None:
            of_verl = row.get("reward_model")
            if isinstance(of_verl, dict) and of_verl.get("ground_truth") is not None:
                key = "reward_model.ground_truth"
            elif not self.needs_label:
                return ""
        value = field_of(row, key, where)
        text = label_text(value)
        if text is None:
            raise ConfigError(
                f"{where}: {key}={value!r}. A label must be a string or a finite number. A reward "
                "function of your own can read other fields of the row in prompt.metadata."
            )
        return text


def tools_of(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the `tools` of a row. Raises ConfigError if the field holds something else."""
    try:
        return read_tools(row.get("tools"))
    except ValueError as error:
        raise ConfigError(
            f"{where}: tools={error}. Correct the row, or rename the field if these are no tools."
        ) from error


def label_text(value: Any) -> str | None:
    """Return a label as text, None if it is none; whole numbers have no fraction, since a numeric
    column with a gap becomes one of floats."""
    if isinstance(value, (float, Decimal)):
        if not isfinite(value):
            return None
        return str(int(value)) if value == int(value) else str(value)
    if value is None or isinstance(value, (dict, list, bytes)):
        return None
    return str(value)


def field_of(row: dict[str, Any], key: str, where: str) -> Any:
    """Return the value under a key; a dotted key reaches into objects."""
    value: Any = row
    for part in [key] if key in row else key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ConfigError(
                f"{where}: no field {key!r}; the row has {', '.join(sorted(row))}. Set --input-key "
                "and --label-key to the names in the file."
            )
        value = value[part]
    return value
