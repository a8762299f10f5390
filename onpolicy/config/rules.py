"""The rules of flags, each in its field's annotation, and the functions that apply them.

    keep_checkpoints: Annotated[CountOrZero, ReadBy("--save", lambda run: run.save)] = 0

An annotation holds the range (`Rule`, `NotAbove`), the reader (`ReadBy`), contradictions (`Against`,
`Together`), the parser of a text (`Parsed`), and whether the flag `DecidesResults`. A rule gets the
values of all flags of a run (`Facts`); a rule in a record with a prefix gets that record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

from fallback_correction.ranges import FieldError, ReadBy, broken_rule, require_order
from onpolicy.config import secrets, sglang_flags
from onpolicy.config.flags import Flag, flag_defaults, flag_values, flags_of, refusal, spelled
from onpolicy.errors import ConfigError


class Facts(SimpleNamespace):
    """The view of a run for rules: each flag by name, `sglang_args`, the `plan`, and the `config`."""

    @classmethod
    def of(cls, config: Any) -> Facts:
        plan, sglang_args = config.plan, config.sglang_args
        return cls(**flag_values(config), plan=plan, config=config, sglang_args=sglang_args)


@dataclass(frozen=True)
class Together:
    """A contradiction between flags, whether they are given or not."""

    when: Callable[[Facts], object]
    """What is found where they do; nothing where they do not."""

    says: str
    """The message, with {run.NAME} for facts and {found} for what is found."""


@dataclass(frozen=True)
class Against:
    """A contradiction of a value other than the default."""

    when: Callable[[Facts], object]
    rule: str
    remedy: str = "Leave one of the two out."
    """As in `Together`, with {default} for the default; the value stands before the rule."""


@dataclass(frozen=True)
class Parsed:
    """The parser of a value, which raises ConfigError if it cannot parse it."""

    by: Callable[[Any], object]


def secret(flag: str) -> Parsed:
    """Return the parser of a secret, which may be in a file: @FILE."""
    return Parsed(partial(secrets.reveal, flag))


@dataclass(frozen=True)
class DecidesResults:
    """Whether a setting changes bits of an aligned run, or more than chance in another. Without a
    note it does; of several notes the nearest counts."""

    value: bool


NO_RESULT = DecidesResults(False)

BY_CONTENT = object()
"""A note on a path that is compared by its content, wherever the content is."""


def decides_results(flag: Flag) -> bool:
    """Return whether runs that differ in this flag are two experiments."""
    notes = (*flag.notes, *flag.outer)
    return next((note.value for note in notes if isinstance(note, DecidesResults)), True)


def validate(config: Any) -> None:
    """Raise ConfigError for the first value of a command's flags that breaks a rule."""
    require_ranges(config)
    require_sense(config)


def require_sense(config: Any) -> None:
    """Raise ConfigError for the first flag that contradicts others, or that nothing would read."""
    for message in _contradictions(config):
        raise ConfigError(message)
    sglang_flags.validate(config.sglang_args, config.plan.aligned_by)
    refuse_unread(config)


def require_ranges(config: Any) -> None:
    """Raise ConfigError for the first number or text outside its flag's range."""
    flags = flags_of(type(config))
    for flag in flags:
        value = flag.value(config)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str) and "\0" in item:
                raise ConfigError(_refused(flag, item, "holds a NUL character. Leave it out."))
            if rule := broken_rule(item, flag.notes):
                raise ConfigError(_refused(flag, item, rule))
    for flag in flags:
        try:
            require_order(flag.record(config), flag.path[-1], flag.notes)
        except FieldError as error:
            raise ConfigError(refusal(flag, error)) from error


def _refused(flag: Flag, item: object, rule: str) -> str:
    """Return the message about a refused value; long values are shortened, and keys are hidden."""
    text = "..." if secrets.is_key(flag.name) else repr(item)
    short = f"{text[:12]}...{text[-12:]} ({len(text)} characters)"
    return f"{spelled(flag.name)}={text if len(text) <= 60 else short}: {rule}"


def _contradictions(config: Any) -> Iterator[str]:
    run, defaults = Facts.of(config), flag_defaults(type(config))
    for flag in flags_of(type(config)):
        value, default = flag.value(config), defaults.get(flag.name)
        for note in (*flag.notes, *flag.outer):
            if isinstance(note, Parsed):
                note.by(value)
            elif isinstance(note, Together) and (found := note.when(run)):
                yield note.says.format(run=run, found=found)
            elif isinstance(note, Against) and value != default and (found := note.when(run)):
                text = f"{note.rule}. {note.remedy}".format(run=run, found=found, default=default)
                yield f"{_given(flag, value)}: {text}"


def refuse_unread(config: Any) -> None:
    """Raise ConfigError for the first flag that is set and that nothing would read. A flag counts as set
    if it differs from its default. Corrections that may be turned on during the run count as on."""
    run, defaults = Facts.of(config), flag_defaults(type(config))
    vars(run).update(dict.fromkeys(config.plan.may_come_on, True))
    for flag in flags_of(type(config)):
        value = flag.value(config)
        if value == defaults.get(flag.name, value):
            continue
        record = flag.record(config) if flag.prefix else run
        for asked, notes in ((record, flag.notes), (run, flag.outer)):
            for note in notes:
                if isinstance(note, ReadBy) and not note.reads(asked):
                    names = {f.name: spelled(flag.spell(f.name)) for f in fields(flag.owner)}
                    raise ConfigError(
                        f"{_given(flag, value)}: only {note.switch.format(**names)} reads it, so it "
                        "would do nothing here. Add what reads it, or leave the flag out."
                    )


def rule_against(config: Any, name: str) -> str:
    """Return the first rule by which other flags contradict a flag, without the remedy; else ""."""
    (flag,) = (each for each in flags_of(type(config)) if each.name == name)
    run = Facts.of(config)
    for note in (*flag.notes, *flag.outer):
        if isinstance(note, Against) and (found := note.when(run)):
            return note.rule.format(run=run, found=found)
    return ""


def _given(flag: Flag, value: object) -> str:
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return f"{spelled(flag.name)}={shown}"
