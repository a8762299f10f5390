"""Judge: a model that scores each sample, through any OpenAI-compatible server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onpolicy.config.groups import RewardConfig
from onpolicy.config.secrets import reveal
from onpolicy.errors import ConfigError
from onpolicy.rewards import Answers, Failure, Numbers
from onpolicy.rewards.endpoint import Endpoint
from onpolicy.rewards.judged_words import words_of
from onpolicy.rewards.numbers import numbers_or_failure, shown
from onpolicy.system.proxies import proxy_of
from onpolicy.types import Sample

_PLACES = re.compile(r"\{(prompt|question|response|label)\}")


class Judge:
    """A judge whose rewards are the verdicts of --judge-model, each on one sample."""

    def __init__(self, config: RewardConfig):
        self.config, self.template = config, _read(config.judge_prompt)
        self._verdict = re.compile(config.judge_verdict)
        url = config.judge_url.rstrip("/") + "/chat/completions"
        key = reveal("--judge-api-key", config.judge_api_key)
        self.endpoint = Endpoint(url, config, key, proxy_of(url, "--judge-url"))

    def ask(self, samples: Sequence[Sample]) -> Answers:
        wait = self.endpoint.begin([self._body(sample) for sample in samples])
        return lambda: [self._reward(answer) for answer in wait()]

    def _body(self, sample: Sample) -> dict[str, Any]:
        words = words_of(sample)
        # In one pass: a response may have {label} in it.
        question = _PLACES.sub(lambda place: words[place[1]], self.template)
        return {
            "model": self.config.judge_model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self.config.judge_max_tokens,
            "temperature": self.config.judge_temperature,
        }

    def _reward(self, answer: Any) -> Numbers | Failure:
        if isinstance(answer, Failure):
            return answer
        try:
            (choice, *_) = answer["choices"]
            text, ended_by = choice["message"].get("content"), choice.get("finish_reason")
        except (KeyError, ValueError, TypeError, AttributeError):
            return Failure(reason=f"was answered with {shown(answer)}: it is no chat completion")
        if ended_by == "length":  # a verdict in it may be a draft, or a part of a number
            limit = f"--judge-max-tokens={self.config.judge_max_tokens}"
            return Failure(reason=f"has an answer that was cut off at {limit}. Raise it")
        if not isinstance(text, str):
            return Failure(
                reason=f"was answered with content={shown(text)}, finish_reason={ended_by!r}: no words"
            )
        verdicts = self._verdict.findall(text)
        if not verdicts:
            return Failure(reason=f"was answered with {shown(text)}: no --judge-verdict is in it")
        try:
            return numbers_or_failure(float(verdicts[-1]))
        except ValueError:
            return Failure(reason=f"was given the verdict {shown(verdicts[-1])}: it is no number")


def _read(file: str) -> str:
    """Return the text of --judge-prompt. Raises ConfigError if it has no {response}."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--judge-prompt={file}: cannot be read ({error}).") from error
    if "{response}" not in text:
        raise ConfigError(
            f"--judge-prompt={file}: the judge would not see what it judges. Write {{response}} where "
            "the response is to stand, and {prompt}, {question} and {label} where these are."
        )
    return text
