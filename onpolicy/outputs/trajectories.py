"""Serialisation of trajectories: whole in checkpoints and cases, as a digest in a journal.

A record is plain JSON that restores every number to the bit. T: tokens; R: sampled ones.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import astuple
from typing import Annotated, NotRequired

import numpy as np
import xxhash
from annotated_types import Ge, Gt, Len
from numpy.typing import NDArray
from pydantic import with_config
from typing_extensions import TypedDict

from onpolicy.grammar import Grammar, GrammarKind, GrammarSpan
from onpolicy.system.records import CLOSED
from onpolicy.trajectory import FinishReason, Span, Trajectory

Count = Annotated[int, Ge(0)]


@with_config(CLOSED)
class GrammarRecord(TypedDict):
    """The record of a `GrammarSpan`."""

    kind: GrammarKind
    text: str
    stop_token_ids: list[Count]
    start: Count
    end: Count


@with_config(CLOSED)
class TrajectoryRecord(TypedDict):
    """The record of a `Trajectory`."""

    token_ids: list[Count]
    """[T]"""
    sampled: list[Annotated[list[Count], Len(2, 2)]]
    """[start, end] of every stretch of sampled tokens."""
    rollout_log_probs: list[float]
    """[R]"""
    temperatures: list[Annotated[float, Gt(0)]]
    """[R]"""
    spans: list[Annotated[list[Count], Len(3, 3)]]
    """[version, start, end]"""
    routed_experts: Annotated[list[Count | str], Len(3, 3)] | None
    """Rows, columns, and as many int32 numbers in base64."""
    kept_tokens: NotRequired[list[str | Count]]
    """[R], if any token was not drawn from the whole vocabulary: a set in base64 at its first
    occurrence, and afterwards its index among those, from 0. (Earlier versions wrote each in
    base64.)"""
    entropy: NotRequired[list[float]]
    """[R], if the engines reported it."""
    grammars: NotRequired[list[GrammarRecord]]
    """The grammars in their order, if there are any."""
    finish_reason: str
    weight_version: Annotated[int, Ge(-1)]
    num_cached_tokens: Count
    num_prefix_tokens: NotRequired[Count]
    """The number of prefix tokens; earlier versions did not count them."""
    forks: list[Annotated[list[str | Count], Len(2, 2)]]


def write(trajectory: Trajectory) -> TrajectoryRecord:
    """Return the record of a trajectory."""
    experts = trajectory.routed_experts
    packed = None if experts is None else base64.b64encode(experts.tobytes()).decode()
    record: TrajectoryRecord = {
        "token_ids": trajectory.token_ids,
        "sampled": _stretches(trajectory.sampled),
        "rollout_log_probs": trajectory.rollout_log_probs,
        "temperatures": trajectory.temperatures,
        "spans": [[*astuple(span)] for span in trajectory.spans],
        "routed_experts": None if experts is None or packed is None else [*experts.shape, packed],
        "finish_reason": str(trajectory.finish_reason),
        "weight_version": trajectory.weight_version,
        "num_cached_tokens": trajectory.num_cached_tokens,
        "num_prefix_tokens": trajectory.num_prefix_tokens,
        "forks": [[*fork] for fork in trajectory.forks],
    }
    if trajectory.kept_tokens:
        record["kept_tokens"] = _write_kept(trajectory.kept_tokens)
    if trajectory.entropy:
        record["entropy"] = trajectory.entropy
    if trajectory.grammars:
        record["grammars"] = [_write_grammar(span) for span in trajectory.grammars]
    return record


def read(record: TrajectoryRecord) -> Trajectory:
    """Return the trajectory of a record of the right shape. Raises ValueError for impossible
    contents."""
    length, log_probs = len(record["token_ids"]), record["rollout_log_probs"]
    sampled = [False] * length
    for start, end in record["sampled"]:
        if not 0 < start < end <= length:
            raise ValueError(f"sampled={[start, end]}: must start after 0 and end by {length}")
        sampled[start:end] = [True] * (end - start)
    for name in ("rollout_log_probs", "temperatures"):
        if sum(sampled) != (count := len(record[name])):
            raise ValueError(
                f"sampled tokens are {sum(sampled)} and {name} {count}: a token has one"
            )
    kept = _read_kept(record.get("kept_tokens", ()))
    if kept and len(kept) != len(log_probs):
        raise ValueError(f"sampled tokens are {len(log_probs)} and kept_tokens {len(kept)}")
    entropy = record.get("entropy", [])
    if entropy and len(entropy) != len(log_probs):
        raise ValueError(f"sampled tokens are {len(log_probs)} and entropy {len(entropy)}")
    return Trajectory(
        token_ids=record["token_ids"],
        sampled=sampled,
        rollout_log_probs=log_probs,
        temperatures=record["temperatures"],
        spans=tuple(_read_span(span, len(log_probs)) for span in record["spans"]),
        routed_experts=_read_experts(record["routed_experts"]),
        kept_tokens=kept,
        entropy=entropy,
        grammars=tuple(_read_grammar(span, length) for span in record.get("grammars", ())),
        finish_reason=FinishReason(record["finish_reason"]),
        weight_version=record["weight_version"],
        num_cached_tokens=record["num_cached_tokens"],
        num_prefix_tokens=record.get("num_prefix_tokens", 0),
        forks=tuple((str(key), int(length)) for key, length in record["forks"]),
    )


def digest(trajectory: Trajectory) -> str:
    """Return 16 hexadecimal digits of the sampled tokens, their log-probabilities and kept tokens."""
    ids, log_probs = trajectory.response_ids, trajectory.rollout_log_probs
    content = struct.pack(f"<{len(ids)}q{len(log_probs)}f", *ids, *log_probs)
    return xxhash.xxh3_64_hexdigest(content + b"".join(trajectory.kept_tokens))


def _write_kept(kept: Sequence[bytes]) -> list[str | int]:
    known: dict[bytes, int] = {}
    written: list[str | int] = []
    for each in kept:
        written.append(known[each] if each in known else base64.b64encode(each).decode())
        known.setdefault(each, len(known))
    return written


def _read_kept(record: Sequence[str | int]) -> list[bytes]:
    """Return the sets of kept tokens; equal ones are held once."""
    known, kept = list[bytes](), list[bytes]()
    for each in record:
        if isinstance(each, str):
            known.append(base64.b64decode(each, validate=True))
        elif each >= len(known):
            raise ValueError(f"kept_tokens={each}: {len(known)} sets come before it")
        kept.append(known[-1] if isinstance(each, str) else known[each])
    return kept


def _write_grammar(span: GrammarSpan) -> GrammarRecord:
    grammar = span.grammar
    return {
        "kind": grammar.kind,
        "text": grammar.text,
        "stop_token_ids": [*grammar.stop_token_ids],
        "start": span.start,
        "end": span.end,
    }


def _read_grammar(record: GrammarRecord, length: int) -> GrammarSpan:
    start, end, stops = record["start"], record["end"], tuple(record["stop_token_ids"])
    if not 0 < start < end <= length:
        raise ValueError(f"grammars={[start, end]}: must start after 0 and end by {length}")
    grammar = Grammar(kind=record["kind"], text=record["text"], stop_token_ids=stops)
    return GrammarSpan(grammar=grammar, start=start, end=end)


def _stretches(sampled: Sequence[bool]) -> list[list[int]]:
    edges = np.flatnonzero(np.diff(np.array(sampled, dtype=bool), prepend=False, append=False))
    stretches: list[list[int]] = edges.reshape(-1, 2).tolist()
    return stretches


def _read_experts(record: Sequence[int | str] | None) -> NDArray[np.int32] | None:
    match record:
        case None:
            return None
        case [int(rows), int(columns), str(packed)]:
            numbers = np.frombuffer(base64.b64decode(packed, validate=True), dtype="<i4")
            return numbers.reshape(rows, columns)
    raise ValueError(f"routed_experts={str(record)[:60]}: must be rows, columns and their numbers")


def _read_span(record: Sequence[int], num_tokens: int) -> Span:
    version, start, end = record
    if start <= end <= num_tokens:
        return Span(version=version, start=start, end=end)
    raise ValueError(f"span={record}: must be a version, a start and an end up to {num_tokens}")
