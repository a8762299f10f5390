"""A sequence classifier of Hugging Face, served by SGLang, which gives each conversation a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onpolicy.chat.messages import answered
from onpolicy.chat.template import ChatTemplate, text_ids
from onpolicy.config.groups import RewardConfig
from onpolicy.config.secrets import reveal
from onpolicy.errors import in_one_line
from onpolicy.models.hf_config import parse_config
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.rewards import Answers, Failure, Numbers
from onpolicy.rewards.endpoint import Endpoint
from onpolicy.rewards.numbers import numbers_or_failure, shown
from onpolicy.types import Sample


class Classifier:
    """What the servers of --reward-checkpoint say of samples, a request each, in turn."""

    def __init__(self, config: RewardConfig):
        path, flag = config.reward_checkpoint, "--reward-checkpoint"
        self.is_chat = config.reward_input == "chat"
        self.tokenizer = load_tokenizer(path, flag=flag)
        self.template = ChatTemplate(self.tokenizer)
        self.padding = getattr(parse_config(path, flag=flag), "pad_token_id", None)
        key = reveal("--reward-api-key", config.reward_api_key)
        self.endpoints = [
            Endpoint(f"{url.rstrip('/')}/classify", config, key) for url in config.reward_server_url
        ]

    def ask(self, samples: Sequence[Sample]) -> Answers:
        asked = [self._rendered(sample) for sample in samples]
        ready = [i for i, each in enumerate(asked) if not isinstance(each, Failure)]
        count = len(self.endpoints)
        shares = [ready[i::count] for i in range(count)]
        waits = [
            endpoint.begin([{"input_ids": asked[i]} for i in share])
            for endpoint, share in zip(self.endpoints, shares, strict=True)
        ]

        def answers() -> list[Numbers | Failure]:
            found: dict[int, Numbers | Failure] = {
                i: each for i, each in enumerate(asked) if isinstance(each, Failure)
            }
            for share, wait in zip(shares, waits, strict=True):
                found |= zip(share, map(_reward, wait()), strict=True)
            return [found[i] for i in range(len(samples))]

        return answers

    def _rendered(self, sample: Sample) -> list[int] | Failure:
        """The tokens of the conversation, or of the text.

        transformers scores the last token that is no padding, and what comes after it changes nothing.
        """
        try:
            token_ids = self._tokens(sample)
        except Exception as error:  # a template is a program of the checkpoint's
            return Failure(
                reason=f"cannot be written by the classifier's tokenizer ({in_one_line(error)})"
            )
        while len(token_ids) > 1 and token_ids[-1] == self.padding:
            token_ids.pop()
        return token_ids

    def _tokens(self, sample: Sample) -> list[int]:
        prompt = sample.prompt
        if not self.is_chat:
            return text_ids(self.tokenizer, prompt.text + sample.response)
        asked = prompt.messages or [{"role": "user", "content": prompt.text}]
        text = self.template.whole(answered(asked, sample.response))
        return self.template.encode(text)


def _reward(answer: Any) -> Numbers | Failure:
    if isinstance(answer, Failure):
        return answer
    numbers = answer.get("embedding") if isinstance(answer, dict) else None
    if not isinstance(numbers, list) or len(numbers) != 1:
        return Failure(reason=f"was answered with {shown(answer)}: it is no classifier's number")
    return numbers_or_failure(numbers[0])
