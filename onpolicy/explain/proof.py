"""The suspected operator alone, on what each side gave it, in the shape in which each side called it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from onpolicy.ops import AttentionLayout, Operators, Scores
from onpolicy.parity.compare import ulp_distance
from onpolicy.taps.evidence import Evidence
from onpolicy.taps.recorder import INPUTS
from onpolicy.taps.rows import by_row

Verdict = Literal[
    "other weights",
    "other keys",
    "depends on the batch",
    "rollout differs",
    "trainer differs",
    "not reproduced",
]
"""other weights, other keys: what the two sides hold there, or read from the cache, differs. depends on
the batch: the operator gives this row other bits in the two shapes. rollout (trainer) differs: that
side's result is not what the operator gives alone, or the engine has a kernel of its own. not
reproduced: none of these was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Between the two sides' results for one row, in the dtype that they came out in."""

    elements: int
    different: int
    max_ulp: int
    """Representable numbers of that dtype."""

    max_abs: float
    first_element: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the operator alone shows."""

    verdict: Verdict
    difference: Difference
    rollout_shape: tuple[int, ...]
    train_shape: tuple[int, ...]

    in_rollout_shape: bool | None
    """Whether the operator alone, on the rollout's arguments, gives the rollout's bits; None: it was
    not run."""

    in_train_shape: bool | None

    same_in_both: bool | None
    """Whether it gives this row the same bits in both shapes."""


def difference(rollout: Sequence[Tensor], train: Sequence[Tensor]) -> Difference:
    """Of two rows, part by part."""
    a, b = (torch.cat([part.reshape(-1).float() for part in parts]) for parts in (rollout, train))
    ulp = ulp_distance(a, b)
    if all(part.dtype == torch.bfloat16 for part in (*rollout, *train)):
        ulp //= 1 << 16
    return Difference(
        elements=len(a),
        different=int((a != b).sum()),
        max_ulp=int(ulp.max()),
        max_abs=float((a.double() - b.double()).abs().max()),
        first_element=int((a != b).int().argmax()),
    )


def prove(
    rollout: Evidence, train: Evidence, objects: Sequence[Any], operators: Operators
) -> Proof:
    """Run the operator on both sides' arguments; `objects`: the trainer's own, for what was not kept."""
    recorded = rollout.row_of_results(), train.row_of_results()
    # An engine's own module says what it was given, and not what it holds.
    held = train.arguments[len(rollout.arguments) :]
    alone = [
        _alone(replace(rollout, arguments=[*rollout.arguments, *held]), objects, operators),
        _alone(train, objects, operators),
    ]
    agrees = [None if a is None else _equal(a, b) for a, b in zip(alone, recorded, strict=True)]
    same = None if None in alone else _equal(alone[0] or [], alone[1] or [])
    return Proof(
        verdict=_held_differently(rollout, train) or _verdict(agrees, same),
        difference=difference(*recorded),
        rollout_shape=rollout.shape,
        train_shape=train.shape,
        in_rollout_shape=agrees[0],
        in_train_shape=agrees[1],
        same_in_both=same,
    )


def _verdict(agrees: list[bool | None], same: bool | None) -> Verdict:
    if agrees[1] is False:
        return "trainer differs"
    if agrees[0] is not True:
        return "rollout differs"
    return "depends on the batch" if same is False else "not reproduced"


def _held_differently(rollout: Evidence, train: Evidence) -> Verdict | None:
    """What has no rows: weights and biases, and the keys and values that attention sees."""
    if rollout.operator == "attention" and len(rollout.arguments) > 3:
        pairs = zip(_seen(rollout), _seen(train), strict=True)
        return None if all(_equal([a], [b]) for a, b in pairs) else "other keys"
    if train.operator == "embedding":  # it looks rows up, and there is no other way to differ
        is_same = _equal(rollout.row_of_results(), train.row_of_results())
        return None if is_same else "other weights"
    first = INPUTS[train.operator].stop if train.operator in INPUTS else 0
    held = zip(rollout.arguments[first:], train.arguments[first:], strict=False)
    tensors = [(a, b) for a, b in held if _is_weight(a) and _is_weight(b)]
    is_same = all(a.shape != b.shape or _equal([a], [b]) for a, b in tensors)
    return None if is_same else "other weights"


def _is_weight(argument: Any) -> bool:
    """Not integers, which say the rows of each expert in this batch."""
    return isinstance(argument, Tensor) and argument.is_floating_point()


def _seen(evidence: Evidence) -> list[Tensor]:
    """Keys and values up to the wanted row's own."""
    after = evidence.rows - 1 - evidence.where[0]
    return [x[: len(x) - after] for x in evidence.arguments[1:3]]


def _alone(evidence: Evidence, objects: Sequence[Any], operators: Operators) -> list[Tensor] | None:
    """What the operator gives the wanted row; None if it cannot be run with what was kept."""
    try:
        if evidence.operator == "attention":
            out = _attend(evidence.arguments, operators)
        else:
            given = [
                own if argument is None else argument
                for argument, own in _filled(evidence.arguments, objects)
            ]
            with torch.no_grad():
                out = getattr(operators, evidence.operator)(*given)
    except (
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
    ):  # of a module that is no operator of ours
        return None
    parts = out if isinstance(out, tuple) else (out,)
    return [by_row(part.cpu(), evidence.rows)[evidence.where].reshape(-1) for part in parts]


def _filled(arguments: Sequence[Any], objects: Sequence[Any]) -> list[tuple[Any, Any]]:
    own = [*objects, *[None] * len(arguments)]
    return list(zip(arguments, own, strict=False))


def _attend(arguments: Sequence[Any], operators: Operators) -> Tensor:
    q, k, v, (scale, window, softcap), *rest = arguments
    layout = AttentionLayout(
        query_lens=(len(q),), key_lens=(len(k),), key_rows=torch.arange(len(k))[None]
    )
    with torch.no_grad():
        return operators.attention(q, k, v, layout, Scores(scale, window, softcap), *rest)


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x.float(), y.float()) for x, y in zip(a, b, strict=True))
