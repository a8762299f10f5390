"""Remote reward: a service of the user's that scores batches (docs/rewards.md has the protocol)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onpolicy.config.groups import RewardConfig
from onpolicy.config.secrets import reveal
from onpolicy.errors import in_one_line
from onpolicy.rewards import Answers, Failure, Numbers
from onpolicy.rewards.endpoint import Endpoint
from onpolicy.rewards.numbers import each_of, numbers_or_failure
from onpolicy.system.json_values import json_value
from onpolicy.system.proxies import proxy_of
from onpolicy.types import Prompt, Sample


class RemoteReward:
    """The rewards of a remote service, --rm-batch-size samples per request."""

    def __init__(self, config: RewardConfig):
        self.batch_size = config.rm_batch_size
        key = reveal("--rm-api-key", config.rm_api_key)
        proxy = proxy_of(config.rm_url, "--rm-url")
        self.endpoint = Endpoint(config.rm_url, config, key, proxy)

    def ask(self, samples: Sequence[Sample]) -> Answers:
        size = self.batch_size
        batches = [samples[i : i + size] for i in range(0, len(samples), size)]
        wait = self.endpoint.begin([{"samples": [*map(_record, batch)]} for batch in batches])

        def answers() -> list[Numbers | Failure]:
            pairs = zip(batches, wait(), strict=True)
            return [one for batch, answer in pairs for one in _rewards(answer, len(batch))]

        return answers


def check_metadata(prompt: Prompt) -> None:
    """Raise ValueError for the first column that JSON cannot hold."""
    for column, value in prompt.metadata.items():
        try:
            json_value(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"column {column!r}: {in_one_line(error)}") from error


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
