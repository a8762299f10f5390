"""Rows with answers as trajectories: given tokens, and tokens to learn."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from onpolicy.chat.messages import Message, read_chat
from onpolicy.chat.template import ChatTemplate, make_template, text_ids
from onpolicy.config.groups import template_options
from onpolicy.config.sft_flags import AnswersConfig
from onpolicy.errors import ConfigError, in_one_line
from onpolicy.rollout.data_files import read_rows
from onpolicy.rollout.prompts import field_of, tools_of
from onpolicy.system.hub import data_path
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A row with its trajectories."""

    prompt: Prompt
    """The tokens before the first answer; `text` is the whole row's text, `label` all answers."""

    trajectories: list[Trajectory]
    """The row's trajectories, usually one: if the chat template rewrites the past, one for each past, as
    the policy would sample it. Every answer is learnt in the first that has it."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the longest trajectory."""
        return max(len(trajectory.token_ids) for trajectory in self.trajectories)


def load_examples(
    path: str,
    config: AnswersConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    max_tokens: int,
    flag: str,
) -> list[Example]:
    """Return all rows of a file, in order; `flag` is for messages. Raises ConfigError, with its
    place, for the first row that cannot be used or is longer than `max_tokens`."""
    reader = _Reader(config, tokenizer, stop_token_ids)
    examples: list[Example] = []
    for where, row in read_rows(data_path(path, flag), f"{flag}={path}"):
        example = reader.example(len(examples), row, where)
        if example.num_tokens > max_tokens:
            raise ConfigError(
                f"{where}: {example.num_tokens} tokens, and the model's context has {max_tokens}. "
                "Shorten the row, or drop it."
            )
        examples.append(example)
    if not examples:
        raise ConfigError(f"{flag}={path}: no rows. Give one with at least one answer.")
    return examples


def samples_of(examples: Iterable[Example]) -> list[Sample]:
    """Return the training samples of these rows; each row is an episode."""
    return [
        Sample(
            prompt=example.prompt,
            sample_index=0,
            trajectory=trajectory,
            group=number,
            episode=number,
        )
        for number, example in enumerate(examples)
        for trajectory in example.trajectories
    ]


class _Reader:
    """A maker of examples from rows. Raises ConfigError for rows that cannot be used."""

    def __init__(
        self,
        config: AnswersConfig,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
    ):
        self._config, self._tokenizer = config, tokenizer
        options = template_options(config.chat_template_kwargs)
        self._template = make_template(tokenizer, stop_token_ids, options=options)
        if tokenizer.eos_token_id is None and not config.apply_chat_template:
            raise ConfigError(
                "--hf-checkpoint: the tokenizer has no end-of-sequence token, so an answer would have "
                "no end to learn. Add eos_token to its tokenizer_config.json."
            )

    def example(self, index: int, row: dict[str, Any], where: str) -> Example:
        """Return the example of a row. Raises ConfigError with `where` if the row cannot be used."""
        content = field_of(row, self._config.input_key, where)
        try:
            if self._config.apply_chat_template:
                messages = self._messages(content, row, where)
                tools = tools_of(row, where)
                trajectories = [*conversation(self._template, messages, tools)]
            else:
                trajectories = [self._text(content, self._label(row, where), where)]
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:  # of the template, or half of a surrogate pair
            raise ConfigError(f"{where}: {in_one_line(error)}. Correct the row.") from error
        return self._example(index, trajectories)

    def _example(self, index: int, trajectories: list[Trajectory]) -> Example:
        texts = [str(self._tokenizer.decode(t.token_ids.tolist())) for t in trajectories]
        learnt = [str(self._tokenizer.decode(t.response_ids.tolist())) for t in trajectories]
        prompt = Prompt(
            index=index,
            prompt_ids=trajectories[0].prompt_ids,
            label="\n".join(learnt),
            text="\n".join(texts),
        )
        return Example(prompt=prompt, trajectories=trajectories)

    def _text(self, prompt: Any, answer: str, where: str) -> Trajectory:
        if not isinstance(prompt, str) or not prompt:
            hint = " Add --apply-chat-template." if isinstance(prompt, list) else ""
            raise ConfigError(f"{where}: prompt={prompt!r}. It must be text.{hint}")
        given = Trajectory.begin(text_ids(self._tokenizer, prompt))
        if not given.token_ids:
            raise ConfigError(f"{where}: prompt={prompt!r} has no tokens. Drop the row.")
        answer_ids = self._tokenizer.encode(answer, add_special_tokens=False)
        return learning(given, [*answer_ids, self._tokenizer.eos_token_id])

    def _messages(self, content: Any, row: dict[str, Any], where: str) -> list[dict[str, Any]]:
        """Return a chat that ends with an answer: its own, or the row's label."""
        try:
            messages = read_chat(content)
        except ValueError as error:
            raise ConfigError(
                f"{where}: {self._config.input_key}: {error}. Correct the row, or set --input-key to "
                "the field with the messages."
            ) from error
        if messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": self._label(row, where)})
        if any(_is_empty(message) for message in messages):
            raise ConfigError(
                f"{where}: an answer of the assistant is empty, so nothing is to be learnt of it. Drop "
                "the row, or the message."
            )
        return messages

    def _label(self, row: dict[str, Any], where: str) -> str:
        answer = field_of(row, self._config.label_key, where)
        if not isinstance(answer, str) or not answer:
            raise ConfigError(
                f"{where}: {self._config.label_key}={answer!r}. An answer to learn is text."
            )
        return answer


def _is_empty(message: Message) -> bool:
    said = (message.get(field) for field in ("content", "reasoning_content", "tool_calls"))
    return message["role"] == "assistant" and not any(said)


def conversation(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> Iterator[Trajectory]:
    """Yield a chat as the policy would sample it, with all answers of the assistant to be learnt.
    Raises ValueError for messages that the template does not take."""
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    now = Trajectory.begin(template.encode(template.opening(messages[: numbers[0]], tools)))
    answered = numbers[0]
    for number in numbers:
        if number > numbers[0]:
            new = messages[answered:number]
            more = template.go_on(now.token_ids, messages[:answered], new, tools)
            # The template rewrote the past: a new trajectory begins after the tokens that it kept.
            if more.drift is not None:
                yield now
                now = now.until(more.kept).as_given(more.kept)
            now = now.given(more.token_ids)
        now = learning(now, template.answer(messages[:number], messages[number], tools))
        answered = number + 1
    yield now


def learning(given: Trajectory, answer_ids: Sequence[int]) -> Trajectory:
    """Return a trajectory continued with tokens to learn."""
    count = len(answer_ids)
    return replace(
        given,
        token_ids=given.token_ids + answer_ids,
        sampled=given.sampled + [True] * count,
        rollout_log_probs=given.rollout_log_probs + [0.0] * count,
        temperatures=given.temperatures + [1.0] * count,
    )
