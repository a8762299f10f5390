"""Reading of request fields: each is honoured, ignored as irrelevant, or refused by name."""

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
"""Fields that would change the sampling distribution, and the values that leave it unchanged."""


class Fields:
    """The fields of a JSON object, taken one after the other."""

    def __init__(self, body: Any, where: str = ""):
        if not isinstance(body, Mapping):
            raise invalid(where or "the body", f"must be an object, and is {body!r:.80}.")
        self._body, self._where = dict(body), where
        self.of_run: dict[str, str] = {}
        """Fields for which the run's value is used, with the reason."""

    def name(self, field: str) -> str:
        """Return the full name of a field, for messages. Example: 'messages[2].content'"""
        return f"{self._where}.{field}" if self._where else field

    def pop(self, field: str) -> Any:
        """Return and remove a field's value, whatever it is; None if it is missing."""
        return self._body.pop(field, None)

    def find(self, field: str, kind: type[T]) -> T | None:
        """Return a field's value, None where it is missing or null. Refuses a value of another
        type."""
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
        """Return a field's value, or `default` where it is missing or null."""
        value = self.find(field, kind)
        return default if value is None else value

    def need(self, field: str, kind: type[T]) -> T:
        """Return a field's value. Refuses a request without it."""
        value = self.find(field, kind)
        if value is None:
            raise invalid(self.name(field), f"is missing: it must be {_NAMES[kind]}.")
        return value

    def count(self, field: str) -> int | None:
        """Return an integer of at least 1, or None where it is missing or null."""
        value = self.find(field, int)
        if value is not None and value < 1:
            raise invalid(self.name(field), f"must be at least 1, and is {value}.")
        return value

    def temperature(self) -> float | None:
        """Return a temperature that gives useful log-probabilities, or None for the run's: also for
        a greedy one, since many agents ask for that without meaning it."""
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
        """Return a text or several as a tuple, none of them empty; an empty tuple where the field
        is missing."""
        value = self.pop(field)
        texts = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
            raise invalid(self.name(field), f"must be a text or a list of texts: {value!r:.80}.")
        return tuple(texts)

    def objects(self, field: str) -> list[Fields]:
        """Return a list of objects; an empty list where the field is missing."""
        items = self.take(field, list, [])
        return [Fields(item, f"{self.name(field)}[{i}]") for i, item in enumerate(items)]

    def refuse(self, field: str, *neutral: Any, because: str) -> None:
        """Refuse any value of a field other than null and the `neutral` values."""
        value = self.pop(field)
        if value is not None and value not in neutral:
            raise RefusedError(
                400,
                f"{self.name(field)}={value!r:.80} cannot be honoured: {because}",
                code="unsupported_parameter",
                field=self.name(field),
            )

    def refuse_other_sampling(self, params: SamplingParams) -> None:
        """Refuse values that would sample from another distribution than the trained policy."""
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
        """Drop fields that do not change sampling."""
        for field in fields:
            self.pop(field)

    def end(self) -> None:
        """Refuse the fields that were not taken."""
        for field, value in self._body.items():
            if value is not None:
                raise RefusedError(
                    400,
                    f"Unrecognized request argument supplied: {self.name(field)}",
                    code="unknown_parameter",
                    field=self.name(field),
                )
