"""HTTP client of remote scorers, with concurrency, retries, timeouts, and a circuit breaker.

`RemoteReward` uses it to ask a service of the user's that scores batches (docs/rewards.md has the
protocol). `Judge` asks a model behind any OpenAI-compatible server about each sample, as text: the words
and who said them, without the control tokens of any model (`words_of`).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from onpolicy.config.groups import RewardConfig
from onpolicy.config.secrets import reveal
from onpolicy.errors import ConfigError, in_one_line
from onpolicy.rewards import Answers, Failure, Numbers
from onpolicy.rewards.numbers import each_of, numbers_or_failure, shown
from onpolicy.system.background import in_background
from onpolicy.system.json_values import json_value
from onpolicy.system.proxies import proxy_of
from onpolicy.types import Prompt, Sample

BACKOFF_SECONDS = 0.25
"""The first pause before a request is repeated; each later pause is twice as long."""

_LONGEST_PAUSE = 30.0

MOST_FAILURES = 8
"""Requests that fail in a row, with all their retries, after which no more are sent."""


class Endpoint:
    """A client of one address, which answers JSON with JSON. Its circuit breaker counts requests
    and not time: `MOST_FAILURES` in a row open it, the rest of that call of `begin` is not sent,
    and the next call sends one request before all others."""

    def __init__(self, url: str, config: RewardConfig, api_key: str, proxy: str | None = None):
        """Take the proxy for requests (`proxy_of`); requests to a process of the run use none."""
        self.url, self.config, self._proxy = url, config, proxy
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._failures_in_a_row = 0

    @property
    def is_open(self) -> bool:
        """Whether the circuit breaker has stopped all requests."""
        return self._failures_in_a_row >= MOST_FAILURES

    def begin(self, bodies: Sequence[Any]) -> Callable[[], list[Any]]:
        """Begin to post bodies; the result waits for the answers, in order: JSON or a Failure each."""
        return in_background(lambda: asyncio.run(self._post_all(bodies)), "rewards").result

    async def _post_all(self, bodies: Sequence[Any]) -> list[Any]:
        at_once = asyncio.Semaphore(self.config.rm_concurrency)
        tried: list[Any] = []
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self.config.rm_request_timeout),
            connector=aiohttp.TCPConnector(limit=0),
        ) as session:
            if self.is_open and bodies:
                tried = [await self._repeated(session, bodies[0])]

            async def post(body: Any) -> Any:
                async with at_once:
                    if self.is_open:
                        limit = f"{MOST_FAILURES} times in a row"
                        return Failure(reason=f"was not sent: {self.url} failed {limit}")
                    return await self._repeated(session, body)

            return [*tried, *await asyncio.gather(*map(post, bodies[len(tried) :]))]

    async def _repeated(self, session: aiohttp.ClientSession, body: Any) -> Any:
        """Return the answer, or the last failure. Metadata is converted to JSON (`json_value`)."""
        try:
            body, answer = json_value(body), None
        except (ValueError, RecursionError) as error:
            return Failure(reason=f"cannot be sent as JSON: {in_one_line(error)}")
        for attempt in range(self.config.rm_retries + 1):
            if attempt:
                await asyncio.sleep(min(BACKOFF_SECONDS * 2 ** (attempt - 1), _LONGEST_PAUSE))
            answer, may_repeat = await self._post(session, body)
            if not may_repeat:
                break
        failed = isinstance(answer, Failure)
        self._failures_in_a_row = self._failures_in_a_row + 1 if failed else 0
        return answer

    async def _post(self, session: aiohttp.ClientSession, body: Any) -> tuple[Any, bool]:
        """Return an answer or a Failure, and whether another attempt may succeed."""
        try:
            # A session's own headers go to a proxy too, in clear, before anything is encrypted.
            async with session.post(
                self.url,
                json=body,
                headers=self._headers,
                allow_redirects=False,
                proxy=self._proxy,
            ) as response:
                if response.status == 200:
                    return await response.json(content_type=None), False
                text = in_one_line(ValueError(await response.text(errors="replace")), 200)
                may_repeat = response.status == 429 or response.status >= 500
                return self._failure(f"HTTP {response.status}: {text}"), may_repeat
        except TimeoutError:
            limit = f"--rm-request-timeout={self.config.rm_request_timeout:g} seconds"
            return self._failure(f"no answer within {limit}"), True
        except (aiohttp.ClientError, OSError) as error:
            return self._failure(f"{type(error).__name__}: {in_one_line(error)}"), True
        except ValueError as error:
            return self._failure(f"its answer is no JSON ({in_one_line(error)})"), True

    def _failure(self, what: str) -> Failure:
        return Failure(reason=f"had no answer from {self.url}: {what}")


BATCH_SIZE = 16


class RemoteReward:
    """The rewards of a remote service."""

    def __init__(self, config: RewardConfig):
        key = reveal("--rm-api-key", config.rm_api_key)
        proxy = proxy_of(config.rm_url, "--rm-url")
        self.endpoint = Endpoint(config.rm_url, config, key, proxy)

    def ask(self, samples: Sequence[Sample]) -> Answers:
        starts = range(0, len(samples), BATCH_SIZE)
        batches = [samples[i : i + BATCH_SIZE] for i in starts]
        wait = self.endpoint.begin([{"samples": [*map(_record, batch)]} for batch in batches])

        def answers() -> list[Numbers | Failure]:
            pairs = zip(batches, wait(), strict=True)
            return [one for batch, answer in pairs for one in _rewards(answer, len(batch))]

        return answers


def _record(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt.text,
        "response": sample.response,
        "label": sample.prompt.label,
        "metadata": sample.prompt.metadata,
        "finish_reason": str(sample.finish_reason.value),
        "prompt_index": sample.prompt.index,
        "sample_index": sample.sample_index,
    }


def _rewards(answer: Any, count: int) -> list[Numbers | Failure]:
    if not isinstance(answer, Failure):
        answer = each_of(answer.get("rewards") if isinstance(answer, dict) else None, count)
    return [answer] * count if isinstance(answer, Failure) else [*map(numbers_or_failure, answer)]


def check_metadata(prompt: Prompt) -> None:
    """Raise ValueError for the first column that JSON cannot hold."""
    for column, value in prompt.metadata.items():
        try:
            json_value(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"column {column!r}: {in_one_line(error)}") from error


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
            "temperature": 0,
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


def words_of(sample: Sample) -> dict[str, str]:
    """Return the text for each placeholder in a judge's prompt. `prompt`: the messages, each with
    its role, or only the words if there is one message, by the user; `question`: the words of the
    user's last message, or the prompt if there is none; `response`, `label`."""
    of = {
        "prompt": _conversation(sample.prompt),
        "question": _question(sample.prompt),
        "response": sample.response,
        "label": sample.prompt.label,
    }
    return {name: without_control_tokens(text) for name, text in of.items()}


def _conversation(prompt: Prompt) -> str:
    if not prompt.messages:
        return prompt.text
    (first, *more) = prompt.messages
    if first.get("role") == "user" and not more:
        return _words(first)
    return "\n\n".join(f"{each.get('role')}: {_words(each)}" for each in prompt.messages)


def _question(prompt: Prompt) -> str:
    asked = [_words(each) for each in prompt.messages or () if each.get("role") == "user"]
    return asked[-1] if asked else _conversation(prompt)


def _words(message: Mapping[str, Any]) -> str:
    """Return the content of a message, and a line for each tool that it calls."""
    calls = [call.get("function") or call for call in message.get("tool_calls") or ()]
    lines = [
        _text(message.get("content")),
        *(f"calls {call.get('name')} {_json(call)}" for call in calls),
    ]
    return "\n".join(filter(None, lines))


def _text(content: Any) -> str:
    """Return content as text, in which an image is `<image>`."""
    if not isinstance(content, list):
        return content or ""
    return "".join(part["text"] if part["type"] == "text" else "<image>" for part in content)


def _json(call: Mapping[str, Any]) -> str:
    arguments = call.get("arguments") or {}
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


_CONTROL_TOKEN = re.compile(
    r"<(?=[|\uff5c]\w|\w{1,32}\|>|/?(?:s|bos|eos|pad|start_of_turn|end_of_turn)>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\])"
)
"""The first character of anything that a judge's tokenizer may take for a control token."""


def without_control_tokens(text: str) -> str:
    """Return text with a space inserted in every control token. Example: '<|end|>' -> '< |end|>' A
    policy may write one in ordinary letters, and the judge's server would parse it as a turn."""
    return _CONTROL_TOKEN.sub(lambda found: f"{found[0]} ", text)
