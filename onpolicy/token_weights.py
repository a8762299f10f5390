"""Weights of sampled tokens in the loss, as episodes and reward functions give them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, get_args

from onpolicy.errors import ConfigError
from onpolicy.types import Term

if TYPE_CHECKING:
    from onpolicy.config import TrainConfig

TOKEN_WEIGHTS = "token_weights"
"""Name of the weights in a returned dictionary."""

_HAS: Mapping[str, tuple[Callable[[TrainConfig], bool], str]] = {
    "objective": (lambda config: True, ""),
    "kl_loss": (lambda config: config.algorithm.use_kl_loss, "--use-kl-loss"),
    "opd_kl": (
        lambda config: (
            bool(config.distillation.names) and config.distillation.opd_loss != "sampled"
        ),
        "a teacher and --opd-loss full or top-k",
    ),
    "entropy": (lambda config: config.algorithm.entropy_coef > 0, "--entropy-coef"),
}
"""Whether a run's loss has each term, and the flag that adds the term."""


def by_term(given: Any) -> dict[Term, Any]:
    """Return weights by term; weights without a term's name belong to the objective. Raises
    ValueError for the name of an unknown term."""
    if given is None:
        return {}
    named: dict[Term, Any] = {**given} if isinstance(given, Mapping) else {"objective": given}
    if unknown := [name for name in named if name not in _HAS]:
        raise ValueError(
            f"{TOKEN_WEIGHTS}[{unknown[0]!r}]: no term of a loss. Name {', '.join(_HAS)}"
        )
    return named


def require_terms(config: TrainConfig, terms: Collection[str], who: str) -> None:
    """Raise ConfigError if `who` weighs a term that the run's loss lacks."""
    if missing := [term for term in terms if term not in terms_of(config)]:
        raise ConfigError(
            f"{who}: {TOKEN_WEIGHTS}[{missing[0]!r}]: the loss of this run has no such term. Leave them "
            f"out, or give {_HAS[missing[0]][1]}."
        )


def terms_of(config: TrainConfig) -> list[Term]:
    """Return the terms of a run's loss."""
    return [term for term in get_args(Term) if _HAS[term][0](config)]


def checked_weights(name: str, values: Any, count: int, of: str) -> list[float]:
    """Return `values` as weights. Raises ValueError as `checked_numbers` does, and for a negative
    weight."""
    weights = checked_numbers(name, values, count, of)
    if (least := min(weights, default=0.0)) < 0:
        raise ValueError(f"{name}={least!r}: must be at least 0")
    return weights


def checked_numbers(name: str, values: Any, count: int, of: str) -> list[float]:
    """Return `values` as floats. Raises ValueError unless it is a list of `count` finite numbers; `of`
    names what they must match."""
    numbers = listed(name, values, "numbers")
    if len(numbers) != count:
        raise ValueError(f"{name}={len(numbers)} numbers: {of} are {count}. Give one for each")
    for value in numbers:
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{name}={value!r}: must be a finite number")
    return [float(value) for value in numbers]


def listed(name: str, values: Any, of: str) -> list[Any]:
    """Return `values` as a list. Raises ValueError if it is not iterable, or is a string or a
    mapping."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r:.60}: must be a list of {of}")
    return [*values]
