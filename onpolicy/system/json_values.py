"""Values of data files, and of functions of the user's own, as JSON can say them (RFC 8259)."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticSerializationError, to_jsonable_python

_NAMES = ("nan", "inf", "-inf")


def json_value(value: Any) -> Any:
    """Return the value as what every strict reader of JSON takes: None, truths, numbers, text, lists and
    objects whose keys are text.

    Arrays and numbers of NumPy are lists and numbers, sets are sorted lists. Times are text of ISO
    8601, decimals their digits, bytes base64 (RFC 4648, section 4). NaN is null: it stands for no
    number, as in the gaps of a column of pandas. Raises ValueError for infinity, half of a surrogate
    pair, two keys that are one text, and whatever else JSON has no word for.
    """
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
    """Return a result with the name of each number that JSON has no word for: "nan", "inf" or "-inf"."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def number(value: Any) -> Any:
    """Return the number that `finite` has named; anything else as it is."""
    return float(value) if value in _NAMES else value


def default(value: Any) -> Any:
    """Return what `json.dumps` is to write of a value that it does not know, as its argument `default`.

    It leaves NaN as it is, for whoever refuses it. Raises TypeError where `json_value` raises
    ValueError, as JSON encoders do.
    """
    try:
        return value.tolist() if hasattr(value, "tolist") else json_value(value)
    except ValueError as error:
        raise TypeError(str(error)) from error


def _key(key: Any) -> str:
    """Return the text of an object's key: that of the JSON of what is no text."""
    said = json_value(key)
    return said if isinstance(said, str) else json.dumps(said)
