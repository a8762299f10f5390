"""Replay of the suspected operator alone, on each side's inputs, in the shape of each side's call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from onpolicy.explain.taps.evidence import Evidence, plain
from onpolicy.explain.taps.recorder import INPUTS
from onpolicy.ops import AttentionLayout, Operators, ScoreRule
from onpolicy.parity import ulp_distance

Verdict = Literal[
    "other weights",
    "other keys",
    "depends on the batch",
    "rollout differs",
    "trainer differs",
    "not reproduced",
]
"""The verdicts, explained in `findings.VERDICTS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference between the two sides' results for one row, in the results' dtype."""

    elements: int
    different: int
    max_ulp: int
    """The largest distance in representable numbers of that dtype."""

    max_abs: float
    first_element: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The result of running the operator alone."""

    verdict: Verdict
    difference: Difference

    in_rollout_shape: bool | None
    """Whether the operator alone, on the rollout's arguments, gives the rollout's bits; None: it
    was not run."""

    in_train_shape: bool | None

    same_in_both: bool | None
    """Whether it gives this row the same bits in both shapes."""


def difference(rollout: Sequence[Tensor], train: Sequence[Tensor]) -> Difference:
    """Return the difference between two rows, over all their parts."""
    a, b = (torch.cat([part.reshape(-1).float() for part in parts]) for parts in (rollout, train))
    dtypes, ulp = {part.dtype for part in (*rollout, *train)}, ulp_distance(a, b)
    if dtypes == {torch.bfloat16}:
        ulp //= 1 << 16
    elif dtypes == {torch.float16}:
        ulp //= 1 << 13  # of normal numbers
    return Difference(
        elements=len(a),
        different=int((a != b).sum()),
        max_ulp=int(ulp.max()),
        max_abs=float((a.double() - b.double()).abs().max()),
        first_element=int((a != b).int().argmax()),
    )


def prove(
    rollout: Mapping[int, Evidence], train: Evidence, operators: Operators, rank: int = 0
) -> Proof:
    """Run the operator on both sides' arguments; a function that the rollout's lack is the
    trainer's.

    rollout: evidence by tensor-parallel rank, of which `rank` differs.
    """
    theirs = _without_padding(_with_whole_input(rollout, train, rank), train)
    recorded = theirs.row_of_results(), train.row_of_results()
    # An engine's own module has recorded its inputs, and not its weights.
    held = train.arguments[len(theirs.arguments) :]
    given = replace(theirs, arguments=[*_filled(theirs.arguments, train.arguments), *held])
    alone = [_alone(given, operators), _alone(train, operators)]
    if held and alone[0] is not None:
        alone[0] = [
            row if columns is None or len(row) == len(wanted) else row[columns]
            for row, wanted, columns in zip(alone[0], recorded[0], train.columns, strict=True)
        ]
    agrees = [None if a is None else _equal(a, b) for a, b in zip(alone, recorded, strict=True)]
    same = None if None in alone else _equal(alone[0] or [], alone[1] or [])
    return Proof(
        verdict=_held_differently(theirs, train, rank) or _verdict(agrees, same),
        difference=difference(*recorded),
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


def _with_whole_input(rollout: Mapping[int, Evidence], train: Evidence, rank: int) -> Evidence:
    """Return the evidence of `rank`, with the inputs of all ranks concatenated where ranks add up
    partial products."""
    mine = rollout[rank]
    if mine.operator not in ("linear", "row_parallel_linear"):
        return mine
    if mine.arguments[0].shape[-1] == train.arguments[0].shape[-1]:
        return mine
    parts = zip(*(evidence.arguments[:2] for evidence in rollout.values()), strict=True)
    whole = [torch.cat(each, dim=-1) for each in parts]
    return replace(mine, arguments=[*whole, *mine.arguments[len(whole) :]])


def _without_padding(rollout: Evidence, train: Evidence) -> Evidence:
    """Return the evidence without the columns that pad the last rank's part of a vocabulary."""
    columns = [
        None if own is None or len(own) == result.shape[-1] else torch.arange(len(own))
        for own, result in zip(train.columns, rollout.results, strict=True)
    ]
    is_padded = rollout.operator == "linear"
    return replace(rollout, columns=columns) if is_padded else rollout


def _held_differently(rollout: Evidence, train: Evidence, rank: int) -> Verdict | None:
    """Compare the arguments without rows: weights and biases, and the keys and values that
    attention sees."""
    if rollout.operator == "attention" and len(rollout.arguments) > 3:
        pairs = zip(_seen(rollout), _seen(train), strict=True)
        is_same = all(_equal([a], [_own_heads(b, a.shape[1], rank)]) for a, b in pairs)
        return None if is_same else "other keys"
    if train.operator == "embedding":  # a lookup of rows, which differs only by its weights
        is_same = _equal(rollout.row_of_results(), train.row_of_results())
        return None if is_same else "other weights"
    first = INPUTS[train.operator].stop if train.operator in INPUTS else 0
    held = zip(rollout.arguments[first:], train.arguments[first:], strict=False)
    tensors = [(a, b) for a, b in held if _is_weight(a) and _is_weight(b)]
    is_same = all(_is_part(a, b, train) for a, b in tensors)
    return None if is_same else "other weights"


def _own_heads(x: Tensor, heads: int, rank: int) -> Tensor:
    return x if x.shape[1] == heads else x[:, rank * heads : (rank + 1) * heads]


def _is_part(mine: Tensor, whole: Tensor, train: Evidence) -> bool:
    """Return whether a weight equals the trainer's, or the part of it that makes the rollout's
    columns."""
    sizes = zip(mine.shape, whole.shape, strict=True)
    axes = [axis for axis, (a, b) in enumerate(sizes) if a != b]
    columns = train.columns[0]
    if columns is not None and len(axes) == 1 and whole.shape[axes[0]] == train.width:
        whole = whole.index_select(axes[0], columns)
        mine = mine.narrow(axes[0], 0, min(len(columns), mine.shape[axes[0]]))
    return mine.shape != whole.shape or _equal([mine], [whole])


def _is_weight(argument: Any) -> bool:
    """Return whether an argument is a weight; integers are the rows of each expert in this batch."""
    return isinstance(argument, Tensor) and argument.is_floating_point()


def _seen(evidence: Evidence) -> list[Tensor]:
    """Return keys and values up to the wanted row's own."""
    after = evidence.rows - 1 - evidence.where[0]
    return [x[: len(x) - after] for x in evidence.arguments[1:3]]


def _alone(evidence: Evidence, operators: Operators) -> list[Tensor] | None:
    """Return the operator's result for the wanted row; None if the kept arguments do not suffice."""
    try:
        with torch.no_grad():
            if evidence.operator == "attention":
                out = _attend(operators, *evidence.arguments)
            else:
                out = getattr(operators, evidence.operator)(*evidence.arguments)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it is no operator of ours
        return None
    parts = out if isinstance(out, tuple) else (out,)
    return evidence.row_of([part.cpu() for part in parts])


def _filled(arguments: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return the arguments, with the other side's object in place of each that cannot be
    serialised."""
    objects = [None if isinstance(other, Tensor) else other for other in others]
    objects += [None] * len(arguments)
    pairs = zip(arguments, objects, strict=False)
    return [own if plain(argument) is None else argument for argument, own in pairs]


def _attend(
    operators: Operators, q: Tensor, k: Tensor, v: Tensor, score: Any, sinks: Tensor | None = None
) -> Tensor:
    layout = AttentionLayout(
        query_lens=(len(q),), key_lens=(len(k),), key_rows=torch.arange(len(k))[None]
    )
    return operators.attention(q, k, v, layout, replace(ScoreRule(*score), sinks=sinks))


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x.float(), y.float()) for x, y in zip(a, b, strict=True))
