"""Reads the fields of a request: each is honoured, known to change nothing, or refused by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from onpolicy.agents.gateway.errors import RefusedError, invalid
from onpolicy.config.kinds import SMALLEST_TEMPERATURE
from onpolicy.types import SamplingParams

T = TypeVar("T")

_NAMES: dict[type, str] = {
    str: "text", int: "an integer", float: "a number", bool: "true or false", list: "a list",
    dict: "an object",
}  # fmt: skip

_NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {},
    "min_tokens": 0, "best_of": 1,
}  # fmt: skip
"""What would sample from another distribution than the policy's, and the value that asks for nothing."""


class Fields:
    """The fields of a JSON object, taken one after the other."""

    def __init__(self, body: Any, where: str = ""):
        if not isinstance(body, Mapping):
            raise invalid(where or "the body", f"must be an object, and is {body!r:.80}.")
        self._body, self._where = dict(body), where
        self.of_run: dict[str, str] = {}
        """Fields whose value is the run's instead, and why."""

    def name(self, field: str) -> str:
        """The name of a field, for messages. Example: 'messages[2].content'"""
        return f"{self._where}.{field}" if self._where else field

    def pop(self, field: str) -> Any:
        """Whatever it says; None if it is not there."""
        return self._body.pop(field, None)

    def find(self, field: str, kind: type[T]) -> T | None:
        """Its value; None where it is missing or null. Refuses one of another kind."""
        value = self.pop(field)
        if value is None:
            return None
        if kind is float and type(value) is int and abs(value) < 1 << 53:
            value = float(value)
        is_bool = isinstance(value, bool)
        if not isinstance(value, kind) or (is_bool and kind is not bool) or value == math.inf:
            raise invalid(self.name(field), f"must be {_NAMES[kind]}, and is {value!r:.80}.")
        return value

    def with_field(self, field: str, value: Any) -> Fields:
        """Return these fields with one more."""
        return Fields({**self._body, field: value}, self._where)

    def take(self, field: str, kind: type[T], default: T) -> T:
        """Its value, or `default` where it is missing or null."""
        value = self.find(field, kind)
        return default if value is None else value

    def need(self, field: str, kind: type[T]) -> T:
        """Its value. Refuses a request without it."""
        value = self.find(field, kind)
        if value is None:
            raise invalid(self.name(field), f"is missing: it must be {_NAMES[kind]}.")
        return value

    def count(self, field: str) -> int | None:
        """A number of something, at least 1."""
        value = self.find(field, int)
        if value is not None and value < 1:
            raise invalid(self.name(field), f"must be at least 1, and is {value}.")
        return value

    def temperature(self) -> float | None:
        """Return one that leaves log-probabilities to learn from; None, which is the run's, for a greedy
        one, since many agents ask for that and mean nothing by it."""
        value = self.find("temperature", float)
        if value is None or value >= SMALLEST_TEMPERATURE:
            return value
        if not value >= 0:
            raise invalid(
                self.name("temperature"),
                f"must be at least {SMALLEST_TEMPERATURE:g}, and is {value}.",
            )
        self.of_run[f"temperature={value:g}"] = (
            "a greedy sample has no log-probabilities to learn from"
        )
        return None

    def texts(self, field: str) -> tuple[str, ...]:
        """A text or several, none of them empty; none where it is missing."""
        value = self.pop(field)
        texts = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
            raise invalid(self.name(field), f"must be a text or a list of texts: {value!r:.80}.")
        return tuple(texts)

    def objects(self, field: str) -> list[Fields]:
        """A list of objects; none where it is missing."""
        items = self.take(field, list, [])
        return [Fields(item, f"{self.name(field)}[{i}]") for i, item in enumerate(items)]

    def refuse(self, field: str, *neutral: Any, because: str) -> None:
        """Refuse a value that asks for something: another than null and those that are `neutral`."""
        value = self.pop(field)
        if value is not None and value not in neutral:
            raise RefusedError(
                400,
                f"{self.name(field)}={value!r:.80} cannot be honoured: {because}",
                code="unsupported_parameter",
                field=self.name(field),
            )

    def refuse_other_sampling(self, params: SamplingParams) -> None:
        """Refuse what would sample from another distribution than the policy that is trained."""
        own = "a token is sampled as the run says, and its log-probability is learnt from. Leave it out."
        for field in ("top_p", "top_k", "min_p"):
            self.refuse(field, getattr(params, field), because=own)
        for field, neutral in _NEUTRAL.items():
            self.refuse(field, neutral, because=own)
        if (seed := self.find("seed", int)) is not None:
            self.of_run[f"seed={seed}"] = (
                "a sample's seed is made of the run's, so that a run can be repeated"
            )

    def ignore(self, *fields: str) -> None:
        """Fields that change nothing of what is sampled."""
        for field in fields:
            self.pop(field)

    def end(self) -> None:
        """Refuse what nobody has taken."""
        for field, value in self._body.items():
            if value is not None:
                raise RefusedError(
                    400,
                    f"Unrecognized request argument supplied: {self.name(field)}",
                    code="unknown_parameter",
                    field=self.name(field),
                )
