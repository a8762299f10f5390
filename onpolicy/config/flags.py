"""A configuration as a list of flags: names, types, defaults and values, without their groups.

A field is a flag of the same name. A record inside a group contributes its fields as flags, with the
prefix in its annotation, `dc: Annotated[DiscrepancyConfig, Prefix("dc_")]`, and so do records inside it.
A trailing underscore of a field, as in `lambda_`, is no part of its flag.

Other notes about a field are in its annotation, too (`config.rules`). Notes on a record apply to all its
flags; notes on flags of a base class, or of a record, are passed to `also`. Fields named in `no_flags`
keep their defaults in every run.
"""

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, reduce
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, TypeVar

from fallback_correction.ranges import FieldError
from onpolicy.errors import ConfigError

Record = TypeVar("Record")
Class = TypeVar("Class", bound=type)

SGLANG_ARGS = "sglang_args"
"""A field that is no flag: what --sglang-* collected."""


@dataclass(frozen=True)
class Prefix:
    """The prefix of a record's flags, which belong to the group that holds the record."""

    text: str


def also(**notes: Sequence[Any]) -> Callable[[Class], Class]:
    """Add notes, by flag name, to flags of a class that are declared elsewhere."""

    def add(owner: Class) -> Class:
        owner._also = {**getattr(owner, "_also", {}), **notes}  # type: ignore[attr-defined]
        return owner

    return add


def no_flags(*names: str) -> Callable[[Class], Class]:
    """Leave fields of a class, or of its records, at their defaults: no flag has these names."""

    def add(owner: Class) -> Class:
        owner._no_flags = frozenset(names)  # type: ignore[attr-defined]
        return owner

    return add


@dataclass(frozen=True)
class Flag:
    """A field that is set from the command line."""

    path: tuple[str, ...]
    """Where its value is: the fields that lead from the configuration to it."""

    prefix: str
    kind: Any
    notes: tuple[Any, ...]
    """What stands beside its type."""

    owner: type
    outer: tuple[Any, ...] = ()
    """What stands beside the records that hold it, and what `also` adds."""

    @cached_property
    def name(self) -> str:
        """Return the name, with _ for -."""
        return self.spell(self.path[-1])

    def spell(self, field: str) -> str:
        """Return the name of the flag for another field of the same record."""
        return self.prefix + field.rstrip("_")

    def record(self, config: Any) -> Any:
        """Return the object with the field: a group, a record in it, or the configuration itself."""
        return reduce(getattr, self.path[:-1], config)

    @cached_property
    def value(self) -> Callable[[Any], Any]:
        """Return the function that reads its value from a configuration."""
        return attrgetter(".".join(self.path))

    @property
    def help(self) -> str:
        """Return the docstring under the field."""
        found = [_docs(owner).get(self.path[-1], "") for owner in self.owner.__mro__]
        return next(filter(None, found), "")


def flags_of(config_class: type) -> tuple[Flag, ...]:
    """Return the flags of a command, or of a group of them, in their order."""
    return _flags_of(config_class)


@cache
def _flags_of(config_class: type) -> tuple[Flag, ...]:
    return tuple(flag for flag in _walk(config_class) if flag.path != (SGLANG_ARGS,))


def _walk(owner: type, path: tuple[str, ...] = (), prefix: str = "") -> Iterator[Flag]:
    hints = typing.get_type_hints(owner, include_extras=True)
    for name in (field.name for field in dataclasses.fields(owner)):
        kind, *notes = (
            typing.get_args(hints[name])
            if typing.get_origin(hints[name]) is Annotated
            else (hints[name],)
        )
        if is_record(kind):
            own = "".join(note.text for note in notes if isinstance(note, Prefix))
            flags = _walk(kind, (*path, name), prefix + own)
        else:
            flags, notes = iter([Flag((*path, name), prefix, kind, tuple(notes), owner)]), []
        for flag in flags:
            if flag.name in getattr(owner, "_no_flags", ()):
                continue
            more = getattr(owner, "_also", {}).get(flag.name, ())
            yield replace(flag, outer=(*flag.outer, *more, *notes))


def is_record(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def flag_types(config_class: type) -> dict[str, Any]:
    """Return the type of every flag, by name with _ for -."""
    return {flag.name: flag.kind for flag in flags_of(config_class)}


def flag_values(config: Any) -> dict[str, Any]:
    """Return the value of every flag, by name."""
    return {flag.name: flag.value(config) for flag in flags_of(type(config))}


def flag_defaults(config_class: type) -> Mapping[str, Any]:
    """Return the default of every flag that has one."""
    return _flag_defaults(config_class)


@cache
def _flag_defaults(config_class: type) -> Mapping[str, Any]:
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
    flags = (flag for flag in flags_of(config_class) if flag.path[0] in defaults)
    return {f.name: reduce(getattr, f.path[1:], defaults[f.path[0]]) for f in flags}


def with_flags(record: Record, values: Mapping[str, Any]) -> Record:
    """Return the configuration, or group, with these values of its flags. Raises ConfigError for a
    value that one of its records refuses, KeyError for an unknown flag."""
    flags = flags_of(type(record))
    paths = {flag.name: flag.path for flag in flags}
    return _replaced(record, {paths[name]: value for name, value in values.items()}, flags)


def _replaced(
    part: Record,
    values: Mapping[tuple[str, ...], Any],
    flags: Sequence[Flag],
    place: tuple[str, ...] = (),
) -> Record:
    """Return a configuration's part at `place` with new values, keyed by paths from there."""
    changes: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in values):
        inner = {path[1:]: value for path, value in values.items() if path[0] == name}
        if () in inner:
            changes[name] = inner[()]
        else:
            changes[name] = _replaced(getattr(part, name), inner, flags, (*place, name))
    try:
        return replace(part, **changes)  # type: ignore[type-var]
    except FieldError as error:
        flag = next(flag for flag in flags if flag.path == (*place, error.name))
        raise ConfigError(refusal(flag, error)) from error


def refusal(flag: Flag, error: FieldError) -> str:
    """Return the message about a value that a record refuses: its flag, the rule, the remedy."""
    return f"{spelled(flag.name)}={error.value}: {error.said(lambda x: spelled(flag.spell(x)))}"


def spelled(name: str) -> str:
    """Return the flag as it is given: `rollout_host` -> `--rollout-host`."""
    return f"--{name.replace('_', '-')}"


@cache
def _docs(owner: type) -> Mapping[str, str]:
    """Return the docstrings under the fields that a class adds to its bases, each in one line."""
    if not dataclasses.is_dataclass(owner):
        return {}
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, below in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            docs[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return docs
