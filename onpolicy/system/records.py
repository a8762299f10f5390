"""Dataclasses as the records of files: written as JSON, and read back strictly."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

from annotated_types import Ge
from pydantic import ConfigDict, GetPydanticSchema, TypeAdapter, ValidationError, with_config
from pydantic_core import SchemaValidator, core_schema

Kind = TypeVar("Kind")

Count = Annotated[int, Ge(0)]

SHOWN = 60

_OTHER_IN_JSON = {"dataclass", "tuple", "enum"}
"""Types that JSON has no word for: they are read from objects, lists and texts."""


class Shape(Generic[Kind]):
    """The records of a dataclass and of all dataclasses in it. Types are never converted, and no
    field may be unknown. A record of our own has every field; a record of others (`is_open`) may
    lack the ones with defaults, and have more."""

    def __init__(self, kind: type[Kind], *, is_open: bool = False):
        config = ConfigDict(strict=True, extra="ignore" if is_open else "forbid")
        self._adapter = TypeAdapter(with_config(config)(kind))
        self._reader = SchemaValidator(_of_json(self._adapter.core_schema, has_all=not is_open))

    def values(self, record: Kind) -> Any:
        """Return a record as values that `json.dumps` takes."""
        return self._adapter.dump_python(record, warnings=False)

    def write(self, record: Kind) -> str:
        """Return a record as JSON. Numbers keep every bit; NaN and infinity are JavaScript's."""
        return json.dumps(self.values(record))

    def read(self, text: bytes | str, context: Any = None) -> Kind:
        """Return the record in a JSON text. Raises ValueError as `take` does, and for other text."""
        try:
            return self.take(json.loads(text), context)
        except RecursionError as error:
            raise ValueError("no record is nested so deeply") from error

    def take(self, values: Any, context: Any = None) -> Kind:
        """Return the record in JSON values. Raises a ValueError that names the first field which is
        missing, unknown or of another type, or whose value is impossible. context: what the fields
        of `written_as` are read with."""
        try:
            found: Kind = self._reader.validate_python(values, context=context)
        except ValidationError as error:
            raise ValueError(_first_fault(error)) from error
        return found


def written_as(
    kind: Any,
    write: Callable[[Any], Any] = lambda value: value,
    read: Callable[[Any, Any], Any] = lambda value, context: value,
) -> Any:
    """Return the annotation of a field that is written as another type. write(value): the value to
    write. read(written, context): the value again; it may raise ValueError."""

    def schema(_: Any, handler: Any) -> core_schema.CoreSchema:
        inner = handler.generate_schema(kind)
        return core_schema.with_info_after_validator_function(
            lambda written, info: read(written, info.context),
            inner,
            serialization=core_schema.plain_serializer_function_ser_schema(
                write, return_schema=inner
            ),
        )

    return GetPydanticSchema(schema)


def _of_json(schema: Any, has_all: bool) -> Any:
    """Return a schema of pydantic's for values that `json.loads` returns. has_all: fields with
    defaults must be there too, except those that are never written."""
    if isinstance(schema, list):
        return [_of_json(each, has_all) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("serialization_exclude"):
        return {**schema, "init": False}
    if has_all and schema.get("type") == "default":
        return _of_json(schema["schema"], has_all)
    made = {name: _of_json(each, has_all) for name, each in schema.items()}
    if made.get("keys_schema", {}).get("type") == "int":  # JSON's keys are texts
        made["keys_schema"]["strict"] = False
    return made | ({"strict": False} if schema.get("type") in _OTHER_IN_JSON else {})


def _first_fault(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or "the record"
    if first["type"] == "missing":
        return f"holds no {place}"
    if first["type"] == "value_error":
        return f"{place}: {first['ctx']['error']}"
    shown = repr(first["input"])
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
    return f"{place}={shown}: {first['msg'].removeprefix('Input ')}"
