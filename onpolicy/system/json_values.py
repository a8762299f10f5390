"""The conversion of values from data files and user functions to JSON (RFC 8259)."""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticSerializationError, to_jsonable_python

_NAMES = ("nan", "inf", "-inf")


def json_value(value: Any) -> Any:
    """Return a value as strict JSON: None, booleans, numbers, text, lists, and objects with text keys.

    NumPy arrays and numbers become lists and numbers, sets become sorted lists, times ISO 8601 text,
    decimals their digits, bytes base64 (RFC 4648, section 4). NaN becomes null, since it means a missing
    number, as in a pandas column. Raises ValueError for infinity, half of a surrogate pair, two keys
    with the same text, and anything else that JSON cannot represent."""
    if isinstance(value, Mapping):
        said = {_key(key): json_value(each) for key, each in value.items()}
        if len(said) < len(value):
            raise ValueError(f"{value!r:.80}: two of its keys are the same text")
        return said
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, (list, tuple)):
        return [json_value(each) for each in value]
    if isinstance(value, str):
        value.encode()  # UnicodeEncodeError is a ValueError
        return str(value)
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError(f"{float(value)}: JSON has no number for it")
        return None if math.isnan(value) else float(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if hasattr(value, "tolist"):
        return json_value(value.tolist())
    try:
        return to_jsonable_python(value)
    except (PydanticSerializationError, TypeError, ValueError) as error:
        kind = type(value).__name__
        raise ValueError(
            f"{value!r:.80}: a value of type {kind} is not JSON serializable"
        ) from error


def finite(value: Any) -> Any:
    """Return a result with "nan", "inf" or "-inf" for numbers that JSON cannot represent."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def number(value: Any) -> Any:
    """Return the number that `finite` replaced by its name; anything else unchanged."""
    return float(value) if value in _NAMES else value


def default(value: Any) -> Any:
    """Return the JSON value of an object that `json.dumps` does not know, as its argument
    `default`. NaN stays as it is, for the caller to refuse. Raises TypeError where `json_value`
    raises ValueError, as JSON encoders do."""
    try:
        return value.tolist() if hasattr(value, "tolist") else json_value(value)
    except ValueError as error:
        raise TypeError(str(error)) from error


def _key(key: Any) -> str:
    """Return an object's key as text; a key that is no text becomes its JSON."""
    said = json_value(key)
    return said if isinstance(said, str) else json.dumps(said)
