"""The effect of settings: whether they decide results, or only places and execution."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onpolicy.config.flags import flags_of, spelled
from onpolicy.config.rules import ByContent, decides_results
from onpolicy.config.sft import AnyRun, SftConfig
from onpolicy.config.train import TrainConfig

DECIDE_NO_RESULT = frozenset(
    flag.name
    for command in (TrainConfig, SftConfig)
    for flag in flags_of(command)
    if not decides_results(flag)
)
"""Settings that change no bit of an aligned run, and nothing but chance in another."""

BY_CONTENT = frozenset(
    flag.name
    for command in (TrainConfig, SftConfig)
    for flag in flags_of(command)
    if any(isinstance(note, ByContent) for note in flag.notes)
)
"""Paths of which whoever compares settings compares the contents instead (`digest_prompts`,
`digest_sets`)."""

_GONE = ("align", "lora_dora", "rollout_kv_format")
"""Settings of earlier versions that decided results where they were set."""

_LENGTHS = {"num_rollout", "num_epoch", "max_steps"}
"""Settings that say when a run ends."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting with its value in a checkpoint and its present value."""

    name: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        return f"{spelled(self.name)}={_text(self.now)}, was {_text(self.recorded)}"


def changes(recorded: Mapping[str, Any], config: AnyRun) -> list[Change]:
    """Return the settings that decide results and differ from an earlier `to_dict`, except BY_CONTENT.

    A flag that the record lacks was added later and counts as its default.
    """
    was, now = type(config)().to_dict() | dict(recorded), config.to_dict()
    gone = [Change(name=n, recorded=was[n], now="removed") for n in _GONE if was.get(n)]
    return gone + [
        Change(name=name, recorded=was[name], now=value)
        for name, value in now.items()
        if name not in DECIDE_NO_RESULT | BY_CONTENT
        and not _is_same(was[name], value)
        and not (name in _LENGTHS and _only_goes_on(name, was, now))
    ]


def same_run(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two `to_dict`s may belong to one run, which may have been extended meanwhile."""
    deciding = (a.keys() & b.keys()) - DECIDE_NO_RESULT - _LENGTHS
    return all(_is_same(a[name], b[name]) for name in deciding)


def _only_goes_on(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a changed length only extends the run.

    It does not if the learning rate depends on the length, or if samples beyond the old end, which a run
    with --rollout-lag draws ahead, are missing.
    """
    longer: bool = now[name] > was[name] and now["lr_decay_style"] == "constant"
    return longer and not now.get("rollout_lag")


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two values are equal; a single text equals a list of it."""
    if isinstance(a, (list, tuple)) or isinstance(b, (list, tuple)):
        a, b = ([x] if isinstance(x, str) else x for x in (a, b))
    return _text(a) == _text(b)


def _text(value: Any) -> str:
    """Return a value as in the record: a list for a tuple, and NaN equal to itself."""
    return json.dumps(value)
