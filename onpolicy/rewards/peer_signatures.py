"""Reward functions that were written for TRL, verl, slime, Miles or prime-rl, as functions of samples.

One is recognised by its parameters: `completions` (TRL), `solution_str` (verl), `args` and `sample`
(slime, Miles), `completion` (verifiers, as in prime-rl). It is called by the names that it has, with
the columns of the prompt's row too; a name that is no column is the label's. What a framework passes and
a run does not have, such as TRL's trainer_state, is not there: a function that requires it fails.

Sources: TRL's GRPOTrainer._calculate_rewards, verl's default_compute_score, slime's rm_hub and
verifiers' Rubric.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from onpolicy.rewards import ANSWER

if TYPE_CHECKING:
    from onpolicy.types import Sample

Reward = Callable[[Any], Any]
"""A function of a sample, or with --group-rm of a list of them."""


def as_ours(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one of ours; unchanged if it has no parameters of another framework."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin
        return function
    if "completions" in names:
        return _of_lists(function)
    if "solution_str" in names:
        return _of_each(_with_answer(function), _verl)
    if names[:2] == ["args", "sample"]:
        return _of_each(function, _slime)
    return _of_each(function, _verifiers) if "completion" in names else function


def _of_each(function: Callable[..., Any], given: Callable[[Sample], dict[str, Any]]) -> Reward:
    """Return a function that calls one of a single sample, for each of a group."""

    def one(sample: Sample) -> Any:
        return _called(function, given(sample), sample.prompt.metadata, sample.prompt.label)

    return lambda samples: [*map(one, samples)] if isinstance(samples, list) else one(samples)


def _of_lists(function: Callable[..., Any]) -> Reward:
    """Return a function that calls one of TRL's, which takes and returns lists over samples."""

    def of_group(samples: list[Sample]) -> Any:
        given = {
            "prompts": [_prompt(sample) for sample in samples],
            "completions": [_completion(sample) for sample in samples],
            "completion_ids": [sample.response_ids for sample in samples],
        }
        rows = [sample.prompt.metadata for sample in samples]
        columns = {name: [row.get(name) for row in rows] for name in rows[0]}
        return _called(function, given, columns, [sample.prompt.label for sample in samples])

    def score(given: Sample | list[Sample]) -> Any:
        if isinstance(given, list):
            return of_group(given)
        (result,) = of_group([given])
        return result

    return score


def _called(
    function: Callable[..., Any], given: Mapping[str, Any], columns: Mapping[str, Any], label: Any
) -> Any:
    """Call the function by the names that it has, or with all there is if it takes any; return its
    result, or an async function's."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    known = {**columns, **given}
    unknown = [name for name, p in named.items() if p.default is p.empty and name not in known]
    if len(unknown) > 1:
        raise TypeError(
            f"the row has no {' and no '.join(unknown)}, and only one of them can be the label; it has "
            f"{', '.join(columns) or 'no columns beside prompt and label'}"
        )
    known |= dict.fromkeys(unknown, label)
    result = function(**{name: x for name, x in known.items() if takes_all or name in named})
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _prompt(sample: Sample) -> Any:
    messages = sample.prompt.messages
    return sample.prompt.text if messages is None else messages


def _completion(sample: Sample) -> Any:
    """Return the response as TRL and verifiers give it: a message of a chat, or text."""
    if sample.prompt.messages is None:
        return sample.response
    return [{"role": "assistant", "content": sample.response}]


def _verifiers(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": _prompt(sample),
        "completion": _completion(sample),
        "answer": sample.prompt.label,
    }


def _with_answer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return verl's function with the text that it reports as `pred` under our name, `answer`."""

    @wraps(function)
    def score(**given: Any) -> Any:
        result = function(**given)
        if isinstance(result, dict) and isinstance(result.get("pred"), str):
            return {ANSWER if key == "pred" else key: x for key, x in result.items()}
        return result

    return score


def _verl(sample: Sample) -> dict[str, Any]:
    row = sample.prompt.metadata
    return {
        "data_source": row.get("data_source", ""),
        "solution_str": sample.response,
        "ground_truth": sample.prompt.label,
        "extra_info": row.get("extra_info") or {},
    }


def _slime(sample: Sample) -> dict[str, Any]:
    prompt = sample.prompt
    theirs = SimpleNamespace(
        prompt=_prompt(sample), response=sample.response, label=prompt.label, index=prompt.index,
        metadata=prompt.metadata, tokens=sample.token_ids, response_length=len(sample.response_ids),
        rollout_log_probs=sample.rollout_log_probs,
    )  # fmt: skip
    return {"args": SimpleNamespace(), "sample": theirs}
