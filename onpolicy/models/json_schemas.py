"""Checks for JSON schema keywords that xgrammar 0.2 reads and does not enforce.

Source: sglang/srt/constrained/json_schema_validation.py, for the keywords and formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NOT_ENFORCED = {
    "contains", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains",
    "multipleOf", "not", "then", "uniqueItems",
}  # fmt: skip
_FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer",
    "relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid",
}  # fmt: skip
_OF_STRINGS = ({"format"}, {"pattern"}, {"minLength", "maxLength"})
"""Keywords of strings, of which only one group can be enforced."""

_ONE = {
    "additionalItems", "additionalProperties", "contentSchema", "items", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
_SEVERAL = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
_BY_NAME = {"$defs", "definitions", "dependencies", "patternProperties", "properties"}
"""Keywords whose values are one schema, a list of schemas, or schemas by name."""


def require_enforced(schema: Any) -> None:
    """Raise ValueError for a schema with a keyword that would not be enforced."""
    for part in _parts(schema):
        if found := sorted(_NOT_ENFORCED & part.keys()):
            raise ValueError(f"{', '.join(found)} would be ignored")
        if part.get("type", "string") != "string" and "string" not in part["type"]:
            continue
        if "format" in part and part["format"] not in _FORMATS:
            raise ValueError(f"format={part['format']!r} would be ignored")
        groups = [group & part.keys() for group in _OF_STRINGS if group & part.keys()]
        if len(groups) > 1:
            names = ", ".join(sorted(set.union(*groups)))
            raise ValueError(f"of {names} one alone can be enforced")


def require_tag_enforced(tag: Any) -> None:
    """Raise ValueError for a structural tag with a schema that would not be enforced in full."""
    if isinstance(tag, list):
        for each in tag:
            require_tag_enforced(each)
    elif isinstance(tag, dict):
        for keyword, value in tag.items():
            check = require_enforced if keyword == "json_schema" else require_tag_enforced
            check(value)


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the schema and all schemas within it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword, value in schema.items():
        if keyword in _ONE:
            yield from _parts(value)
        if keyword in _SEVERAL and isinstance(value, list):
            for each in value:
                yield from _parts(each)
        if keyword in _BY_NAME and isinstance(value, dict):
            for each in value.values():
                yield from _parts(each)
