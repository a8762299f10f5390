"""Check that the labels of prompts can be met: a right answer to each must get a rule's reward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from onpolicy.config.groups import RewardConfig
from onpolicy.errors import ConfigError
from onpolicy.rewards import Failure, Numbers, load_rule
from onpolicy.rewards.scoring_workers import Workers, default_workers
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt, Sample

logger = logging.getLogger(__name__)

MOST_LATE = 8
"""The number of late trials after which no more are made."""

_TRIED_AT_ONCE = 16
"""Trials at once for each worker."""

_MANY = 1000
"""The number of trials from which the log announces them, since they take long."""


class Refused(NamedTuple):
    """A label that no answer can meet."""

    prompt: Prompt
    rule: str
    reason: str


class Trial(NamedTuple):
    """A response to a label, and the score that it must get."""

    label: str
    response: str
    score: float


def refused_labels(
    prompts: Sequence[Prompt], rules_of: Callable[[Prompt], Iterable[str]], config: RewardConfig
) -> list[Refused]:
    """Return the labels that the rules of each prompt refuse, in the prompts' order. A rule with
    `trials` scores them in worker processes and under --rm-time-limit: a comparison may hang where
    no signal ends it. Of labels with one form the first is tried, and the others only if it is
    refused."""
    pairs = [(prompt, rule) for prompt in prompts for rule in rules_of(prompt)]
    labels: dict[str, dict[str, None]] = {}
    for prompt, rule in pairs:
        labels.setdefault(rule, {})[prompt.label] = None
    reasons = {rule: _reasons(rule, [*each], config) for rule, each in labels.items()}
    return [
        Refused(prompt, rule, reasons[rule][prompt.label])
        for prompt, rule in pairs
        if prompt.label in reasons[rule]
    ]


def told(refused: Sequence[Refused], num_prompts: int, name_of: Callable[[str], str]) -> str:
    """Return a message: the first three refused labels, the number of prompts with one, the remedy."""
    each = "; ".join(
        f"prompt {prompt.index}, label={prompt.label[:80]!r}: {name_of(rule)} cannot read it: {reason}"
        for prompt, rule, reason in refused[:3]
    )
    count = len({prompt.index for prompt, *_ in refused})
    return (
        f"{each}. A right answer to {count} of {num_prompts} labels would be scored as wrong. Correct "
        "these rows or leave them out, or choose another rule."
    )


def _reasons(rule: str, labels: Sequence[str], config: RewardConfig) -> dict[str, str]:
    """Return the reasons for which the rule refuses labels, by label; accepted labels are missing."""
    module = load_rule(rule)
    reasons: dict[str, str] = {}
    alike: dict[str, list[str]] = {}
    for label in labels:
        try:
            module.check_label(label)
        except ValueError as error:
            reasons[label] = str(error)
            continue
        if hasattr(module, "trials"):
            alike.setdefault(module.form(label), []).append(label)

    def tried(labels: Iterable[str]) -> dict[str, str]:
        each = [Trial(label, *x) for label in labels for x in module.trials(label).items()]
        return _reasons_by_trial(rule, each, config) if each else {}

    refused = tried(first for first, *_ in alike.values())
    others = [label for first, *more in alike.values() if first in refused for label in more]
    return reasons | refused | tried(others)


def _reasons_by_trial(rule: str, trials: Sequence[Trial], config: RewardConfig) -> dict[str, str]:
    """Return the reasons for which a rule scores responses wrongly, by label. Raises ConfigError if
    the rule cannot be imported in a process of its own."""
    count = min(config.rm_workers or default_workers(), 1 + len(trials) // _TRIED_AT_ONCE)
    size = count * _TRIED_AT_ONCE
    if len(trials) > _MANY:
        logger.info(
            "labels: trying %d responses that %s must score right or wrong", len(trials), rule
        )
    workers = Workers(config, [rule], count=count, is_trial=True)
    reasons: dict[str, str] = {}
    num_late = 0
    try:
        for start in range(0, len(trials), size):
            tried = trials[start : start + size]
            answers = workers.ask(rule, [[_sample(trial) for trial in tried]])
            for trial, found in zip(tried, answers(), strict=True):
                if isinstance(found, Failure) and found.in_loading:
                    raise ConfigError(
                        f"the rule {rule} {found.reason}, so no label can be tried. Read what its "
                        "process wrote; a script that starts this needs `if __name__ == '__main__':`."
                    )
                num_late += isinstance(found, Failure) and found.is_late
                if reason := _reason(trial, found):
                    reasons[trial.label] = reason
            if num_late >= MOST_LATE:
                logger.warning(
                    "labels: no more are tried after %d of %d trials",
                    start + len(tried),
                    len(trials),
                )
                break
    finally:
        workers.close()
    return reasons


def _reason(trial: Trial, found: Numbers | Failure) -> str:
    """Return why the score of a response is wrong; empty if it is right."""
    response = f"the response {trial.response[:80]!r}"
    if isinstance(found, Failure):
        return f"{response} {found.reason}"
    is_right = found["score"] == 1.0
    return (
        ""
        if found["score"] == trial.score
        else f"{response} would be {'right' if is_right else 'wrong'}"
    )


def _sample(trial: Trial) -> Sample:
    prompt = Prompt(index=0, prompt_ids=[], label=trial.label, text="")
    trajectory = Trajectory.begin([])
    return Sample(prompt=prompt, sample_index=0, trajectory=trajectory, response=trial.response)
