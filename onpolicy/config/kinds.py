"""The kinds of values that flags take: a type with its range, for the annotations of flags."""

import json
from typing import Annotated, Any

from fallback_correction.ranges import Rule, above, at_least, at_most
from onpolicy.errors import ConfigError

SMALLEST_TEMPERATURE = 1e-6
"""SGLang samples greedily below it."""

LAST_PORT = 65535

Count = Annotated[int, at_least(1)]
CountOrZero = Annotated[int, at_least(0)]
NonNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, above(0)]
Seconds = Annotated[float, above(0), at_most(1e9)]

Seed = Annotated[int, at_least(0), at_most(2**32 - 1)]
Port = Annotated[int, at_least(0), at_most(LAST_PORT)]
Threads = Annotated[int, at_least(0), at_most(4096)]
Engines = Annotated[int, at_least(1), at_most(1024)]
Temperature = Annotated[float, at_least(SMALLEST_TEMPERATURE)]

Momentum = Annotated[
    float, Rule(lambda x: 0 <= x < 1, "must be in [0, 1). Give a value in that range.")
]

HeaderText = Annotated[
    str,
    Rule(
        lambda x: x.isascii() and x.isprintable(),
        "goes into an HTTP header. Use printable ASCII characters.",
    ),
]

Directory = Annotated[
    str, Rule(lambda x: x.strip(), "is empty. Give a directory, or leave the flag out.")
]


class Unasked(int):
    """A default that is lowered where it does not fit (`run/launch/input_checks.py`)."""


def json_object(text: str, flag: str, example: str) -> dict[str, Any]:
    """Return the JSON object in a flag's text. Raises ConfigError for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag}={text!r:.60}: must be a JSON object, such as '{example}'.")
    return value
