"""Parser of the command line: from arguments and a YAML file to a typed configuration.

The file of --custom-config-path is turned into arguments; the command line wins over it. The parser
also sets environment variables that libraries read on import, since imports come next.
"""

import contextlib
import dataclasses
import difflib
import io
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from onpolicy.cli.gone_flags import ours_for, override_in, require_not_gone
from onpolicy.cli.help import help_asked, help_of
from onpolicy.compat.process import use_variables_of
from onpolicy.config import sglang_flags
from onpolicy.config.flags import (
    SGLANG_ARGS,
    flag_types,
    flag_values,
    flags_of,
    is_record,
    spelled,
    with_flags,
)
from onpolicy.config.groups import AlgorithmConfig, OperatorsConfig
from onpolicy.config.groups.algorithm_flags import RECIPES
from onpolicy.config.strict_yaml import broken_kind, read_mapping, require_known
from onpolicy.errors import ConfigError

CONFIG_KEY = "custom_config_path"
SGLANG = "sglang_"

Config = TypeVar("Config")


def parse(config_class: type[Config], argv: Sequence[str], prog: str) -> Config:
    """Parse the flags of a dataclass, in groups or not. Raises ConfigError for a bad YAML file, a value
    of another type than its flag's, and arguments that are no flags, with the nearest name."""
    if (asked := help_asked(argv)) is not None:
        print(help_of(config_class, prog, asked))
        sys.exit(0)
    rest, sglang_args = sglang_flags.split(argv)
    require_not_gone(rest)
    kinds = flag_types(config_class)
    _require_no_override(rest, kinds)
    path = _config_path(rest) if CONFIG_KEY in kinds else ""
    from_file = read_arguments(path, kinds) if path else ([], [])
    arguments = [*from_file[0], *rest]
    config, unknown = _parsed(config_class, arguments, prog)
    recipe = RECIPES.get(getattr(config, "algorithm", AlgorithmConfig()).recipe, {})
    adapter = _adapter_flags(flag_values(config).get("lora_adapter", ""))
    if told := {**recipe, **adapter}:
        arguments = [x for key, value in told.items() for x in as_argument(key, value)] + arguments
        config, unknown = _parsed(config_class, arguments, prog)
        _require_as_told(config, adapter)
    if unknown:
        raise ConfigError(_unknown(unknown[0], rest, kinds, prog))
    if sglang := (*from_file[1], *sglang_args):
        if SGLANG_ARGS not in {field.name for field in dataclasses.fields(config)}:  # type: ignore[arg-type]
            raise ConfigError(f"{' '.join(sglang_args)}: {prog} starts no server.")
        config = dataclasses.replace(config, sglang_args=sglang)  # type: ignore[type-var]
    use_variables_of(getattr(config, "operators", OperatorsConfig()).operators)
    return config


def config_of(config_class: type[Config], flags: Mapping[str, Any], name: str) -> Config:
    """Return the configuration with flags that are given as in a YAML file; `name` says where, in
    messages. Raises ConfigError as `parse` does."""
    ours, sglang = _arguments(flags, flag_types(config_class), name)
    return parse(config_class, [*ours, *(x.replace("--", "--sglang-", 1) for x in sglang)], name)


def _config_path(argv: Sequence[str]) -> str:
    """Return the value of --custom-config-path, which tyro accepts with underscores, too."""
    found: list[str] = []
    for i, arg in enumerate(argv):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") == spelled(CONFIG_KEY):
            found.append(value if equals else "".join(argv[i + 1 : i + 2]))
    if len(found) > 1:
        raise ConfigError(
            f"{spelled(CONFIG_KEY)}={found[1]}: given twice, and one file is read. Put both "
            "into one."
        )
    return found[0] if found else ""


def read_arguments(path: str, kinds: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the arguments of the file, and its arguments for SGLang; `kinds` holds the type of every
    flag. Raises ConfigError for a file, a key or a value that is no part of a configuration."""
    name = f"{spelled(CONFIG_KEY)}={path}"
    values = read_mapping(path, name)
    if CONFIG_KEY in values:
        raise ConfigError(f"{name}: {CONFIG_KEY} does nothing inside the file. Leave it out.")
    return _arguments(values, kinds, name)


def _arguments(
    values: Mapping[str, Any], kinds: Mapping[str, Any], name: str
) -> tuple[list[str], list[str]]:
    """Return values of flags as arguments, and those for SGLang. `name`: where they are given."""
    ours: list[str] = []
    sglang: list[str] = []
    for key, value in values.items():
        if isinstance(key, str) and key.startswith(SGLANG):
            sglang += _sglang_argument(key, value, name)
            continue
        require_not_gone([f"{spelled(str(key))}={value}"])
        require_known(key, kinds, name)
        if rule := broken_kind(value, kinds[key]):
            raise ConfigError(f"{name}: {key}={value!r}: {rule}.")
        ours += as_argument(key, value)
    return ours, sglang


def as_argument(key: str, value: object) -> list[str]:
    """Return a flag, named with _ for -, and its value as arguments of the command line."""
    flag = spelled(key)
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]


def _sglang_argument(key: str, value: object, name: str) -> list[str]:
    """Return a flag for SGLang, which alone knows its type: true sets a switch, false leaves it out."""
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, (str, int, float)) for item in items):
        raise ConfigError(
            f"{name}: {key}={value!r}: must be text, a number, true or a list of them."
        )
    flag = spelled(key.removeprefix(SGLANG))
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, *map(str, items)]


def _adapter_flags(directory: str) -> dict[str, Any]:
    """Return the flags that the adapter of --lora-adapter implies."""
    from onpolicy.models.lora.peft_adapter import read_peft_adapter

    return read_peft_adapter(directory, "--lora-adapter").flags if directory else {}


def _require_as_told(config: Any, adapter: dict[str, Any]) -> None:
    """Raise ConfigError for a given flag that contradicts --lora-adapter."""
    values = flag_values(config)
    for name, told in adapter.items():
        if values[name] != told:
            raise ConfigError(
                f"{spelled(name)}={values[name]}: the adapter of "
                f"--lora-adapter={values['lora_adapter']} has {told}. Leave {spelled(name)} out."
            )


class _Refused(Exception):
    """A carrier of a ConfigError through tyro, which would print a box of its own for a ValueError."""


def _parsed(
    config_class: type[Config], arguments: list[str], prog: str
) -> tuple[Config, list[str]]:
    registry = ConstructorRegistry()

    @registry.struct_rule
    def group(info: StructTypeInfo) -> StructConstructorSpec | None:
        is_group = is_record(info.type) and info.type is not config_class
        return _group(info.type()) if is_group else None

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                config_class,
                args=arguments,
                prog=prog,
                return_unknown_args=True,
                registry=registry,
                config=(tyro.conf.OmitArgPrefixes,),  # a flag does not begin with its group's name
            )
    except _Refused as refused:
        raise refused.args[0] from None
    except SystemExit:
        if (rule := _rule_in(said.getvalue())) is None:
            sys.stderr.write(said.getvalue())
            raise
        raise ConfigError(f"{rule}. See {prog} --help") from None


_BOXES = (
    (r"Error parsing (--\S+?):? (.*)", "{0}: {1}"),
    (r"invalid choice '(.*)' for argument '(--\S+)'\. (.*)", "{1}={0}: {2}"),
    (r"Missing value for argument '(--\S+)'\. (.*)", "{0}: has no value. {1}"),
)
"""Patterns of tyro's error boxes for values that a flag does not take, and our messages for them."""


def _rule_in(box: str) -> str | None:
    """Return our message for one of tyro's error boxes, whose lines are wrapped; None for others."""
    words = " ".join(re.sub(r"[^\w\s!-~]", " ", box).split())
    said = re.split(r" -{9,} | Argument helptext", f"{words} ")
    for pattern, form in _BOXES:
        if len(said) > 1 and (found := re.fullmatch(pattern, said[1].strip())):
            return form.format(*found.groups()).rstrip(".")
    return None


def _group(default: Any) -> StructConstructorSpec:
    """Return the spec of a group as one list of flags, including flags of nested records."""

    def make(**values: Any) -> Any:
        try:
            return with_flags(default, values)
        except ConfigError as error:
            raise _Refused(error) from error

    fields = [
        StructFieldSpec(flag.name, flag.kind, flag.value(default), partial(getattr, flag, "help"))
        for flag in flags_of(type(default))
    ]
    return StructConstructorSpec(instantiate=make, fields=tuple(fields))


def _unknown(arg: str, argv: Sequence[str], keys: Collection[str], prog: str) -> str:
    """Return the message for an argument that no flag takes."""
    if not arg.startswith("-"):
        before = argv[argv.index(arg) - 1] if arg in argv[1:] else ""
        where = f" after {before}" if before.startswith("--") else ""
        return (
            f"{arg!r}{where}: is no flag, and no flag takes it as a value. Switches have none: they are "
            f"--name or --no-name. See {prog} --help"
        )
    flags = [*map(spelled, keys), *(spelled(f"no_{key}") for key in keys)]
    name = arg.split("=")[0].replace("_", "-")
    others = [flag for flag in flags if flag != name]  # a flag may be one of another command alone
    nearest = difflib.get_close_matches(name, others, 1, cutoff=0.75)
    hint = f"Did you mean {nearest[0]}? " if nearest else ""
    if (ours := ours_for(name)) and ours in keys:
        hint = f"It is {spelled(ours)} here. "
    return f"{arg}: unknown flag. {hint}See {prog} --help"


def _require_no_override(argv: Sequence[str], keys: Collection[str]) -> None:
    """Raise ConfigError for a verl override, which a flag with several values would take as a value."""
    for argument in argv:
        if (path := override_in(argument)) is not None:
            ours = ours_for(path)
            hint = f" It is {spelled(ours)} here." if ours and ours in keys else ""
            raise ConfigError(
                f"{argument}: is an override of verl's, and flags are --name VALUE.{hint} See --help"
            )
