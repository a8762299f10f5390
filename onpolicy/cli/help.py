"""The help of a command: the flags of a first run, those of a group, or all."""

import shutil
import textwrap
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import cleandoc
from typing import Any, Literal

import tyro

from onpolicy.config.flags import SGLANG_ARGS, Flag, flag_defaults, flags_of, spelled
from onpolicy.errors import ConfigError

FIRST: Mapping[str, tuple[str, ...]] = {
    "What is trained, on what": (
        "hf_checkpoint", "prompt_data", "input_key", "label_key", "apply_chat_template",
    ),
    "What a response is worth": ("rm_type", "custom_rm_path", "rewards"),
    "Rollouts": (
        "num_rollout", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len",
        "rollout_temperature",
    ),
    "Both engines agree, or the rollout is corrected": ("true_on_policy_mode", "use_tis"),
    "Algorithm": (
        "recipe", "advantage_estimator", "eps_clip", "eps_clip_high", "use_kl_loss",
        "kl_loss_coef", "dynamic_sampling",
    ),
    "Optimizer and memory": (
        "lr", "lr_warmup_steps", "global_batch_size", "max_tokens_per_gpu",
        "activation_checkpointing", "lora_rank",
    ),
    "GPUs": ("actor_num_gpus_per_node", "rollout_num_engines", "colocate", "rollout_lag"),
    "Evaluation": ("eval_prompt_data", "eval_interval", "n_samples_per_eval_prompt"),
    "Outputs": ("run_dir", "save", "save_interval", "load", "use_wandb"),
    "The run": ("seed", "custom_config_path", "dry_run"),
}  # fmt: skip
"""The flags that a first run of `onpolicy train` needs, in the order in which one meets them."""

ALL = "all"
COMMON = "command"
"""The name of the group of flags that stand in no group."""

WIDTH = 100

LONGEST_DEFAULT = 60
"""The most characters of a default that is shown; the text of a flag describes a longer one."""


def help_asked(argv: Sequence[str]) -> str | None:
    """Return what help is asked for: a group, `all`, "" for the first flags; None: no help is."""
    for place, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name in ("-h", "--help"):
            following = "".join(argv[place + 1 : place + 2])
            return value if equals else "" if following.startswith("-") else following
    return None


def help_of(config_class: type, prog: str, asked: str = "") -> str:
    """Return the help of a command, of a group of its flags, or of all of them. Raises ConfigError
    for an unknown group."""
    groups = _by_group(config_class)
    if asked not in ("", ALL, *groups):
        raise ConfigError(
            f"--help={asked}: there is no such group. Give one of {', '.join(groups)}, or {ALL}."
        )
    flags = {flag.name: flag for flag in _shown_flags(config_class)}
    if asked in groups:
        shown: Mapping[str, Sequence[Flag]] = {asked: groups[asked]}
    elif asked == ALL or prog != "onpolicy train":
        shown = groups
    else:
        shown = {title: [flags[name] for name in names] for title, names in FIRST.items()}
    width = min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH)
    defaults = flag_defaults(config_class)
    places = [flag for flag in flags.values() if _is_place(flag)]
    usage = " ".join(["usage:", prog, *(_value(flag) for flag in places), "[flags]"])
    parts = [usage, cleandoc(config_class.__doc__ or "")]
    for title, some in shown.items():
        parts.append("\n".join([f"{title}:", *(_described(f, defaults, width) for f in some)]))
    if SGLANG_ARGS in {field.name for field in fields(config_class)}:
        parts.append("SGLang's own flags: --sglang-NAME VALUE.")
    return "\n\n".join([*parts, _more(groups, shown, prog, len(flags))])


def _shown_flags(config_class: type) -> list[Flag]:
    """Return the flags of a command, without those that it hides."""
    return [flag for flag in flags_of(config_class) if tyro.conf.Suppress not in flag.notes]


def _by_group(config_class: type) -> dict[str, list[Flag]]:
    """Return the flags of a command by their groups, in order."""
    groups: dict[str, list[Flag]] = {}
    for flag in _shown_flags(config_class):
        groups.setdefault(flag.path[0] if len(flag.path) > 1 else COMMON, []).append(flag)
    return groups


def _more(
    groups: Mapping[str, Sequence[Flag]], shown: Mapping[str, Any], prog: str, count: int
) -> str:
    """Return the last lines: where the other flags are."""
    if shown is groups:
        return f"A group alone: {prog} --help GROUP."
    names = textwrap.fill(", ".join(groups), WIDTH - 2)
    return (
        f"All {count} flags: {prog} --help {ALL}. A group of them: {prog} --help GROUP, with one of\n"
        + textwrap.indent(names, "  ")
    )


def _described(flag: Flag, defaults: Mapping[str, Any], width: int) -> str:
    """Return the lines about a flag: its name and values, its default, its text."""
    default = defaults.get(flag.name)
    if _is_place(flag):
        name = _value(flag)
    elif flag.kind is bool:
        name = f"{spelled(flag.name)}, {spelled('no_' + flag.name)}"
    else:
        name = f"{spelled(flag.name)} {_value(flag)}"
    shown = "" if default in (None, "", (), "{}") else _shown(default)
    said = f"  (default: {shown})" if 0 < len(shown) <= LONGEST_DEFAULT else ""
    lines = textwrap.wrap(flag.help, width - 6, break_on_hyphens=False)
    return "\n".join([f"  {name}{said}", *(" " * 6 + line for line in lines)])


def _is_place(flag: Flag) -> bool:
    """Return whether a value is given by its place, without the flag's name."""
    return tyro.conf.Positional in flag.notes


def _value(flag: Flag) -> str:
    """Return the form of a flag's value."""
    kind, many = flag.kind, ""
    if typing.get_origin(kind) is tuple:
        kind, many = typing.get_args(kind)[0], " ..."
    choices = [x for part in (kind, *typing.get_args(kind)) for x in _choices(part)]
    if choices:
        return "{" + ",".join(repr(x) if x == "" else str(x) for x in choices) + "}" + many
    kinds = [part for part in (kind, *typing.get_args(kind)) if part in (int, float, str)]
    names = {int: "N", float: "X", str: "TEXT"}
    return flag.name.upper() if _is_place(flag) else names.get(kinds[0], "VALUE") + many


def _choices(kind: Any) -> Sequence[Any]:
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
