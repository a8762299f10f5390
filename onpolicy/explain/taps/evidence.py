"""Evidence of one call: its tensors, copied so that it can be repeated elsewhere, and its scope.

The scope is the running module, and the sharding of its tensors over a trainer's ranks.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onpolicy.explain.taps.row_keys import by_row, by_rows, cut

SUFFIX = ".evidence"

ATTENTION = {"attention", "paged_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The arguments and results of a call; attention is cut to a single sequence: its queries, and
    the keys and values that they see."""

    operator: str

    arguments: list[Any]
    """Tensors on the CPU, and other arguments; in evidence from a file an argument that cannot be
    serialised (a function, ranks) is None."""

    results: list[Tensor]
    """One tensor, or each of several results."""

    where: list[int]
    """The wanted key's row among `rows`: one, or in experts one for each expert that its token
    chose."""

    rows: int

    columns: list[Tensor | None]
    """int64, for each result the columns that the other side has; None: all."""

    def row_of_results(self) -> list[Tensor]:
        """Return the results for the wanted row: [n] each."""
        return self.row_of(self.results)

    def row_of(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return the wanted row of this call's results, or of others in their shapes."""
        pairs = zip(results, self.columns, strict=True)
        return [cut(self._rows(result), columns).reshape(-1) for result, columns in pairs]

    @property
    def width(self) -> int:
        """The number of columns of the first result, including those the other side lacks."""
        return self._rows(self.results[0]).shape[1]

    def _rows(self, result: Tensor) -> Tensor:
        return by_row(result, self.rows)[self.where].reshape(len(self.where), -1)

    @staticmethod
    def of(
        operator: str, args: Sequence[Any], out: Any, where: list[int], rows: int,
        columns: Sequence[Tensor | None] = (),
    ) -> Evidence:  # fmt: skip
        """Return the evidence of a call, taken during the call: a trainer's weights are gone when
        its forward pass has ended."""
        results = out if isinstance(out, tuple) else (out,)
        wanted = list(columns) or [None] * len(results)
        if operator in ATTENTION and len(args) > 3:
            operator = "attention"
            args, results, where, rows = _of_one_sequence(args, results[0], where[0])
        return Evidence(
            operator=operator,
            arguments=[_copied(argument) for argument in args],
            results=[_copied(part) for part in results],
            where=where,
            rows=rows,
            columns=wanted,
        )


def _copied(argument: Any) -> Any:
    return argument.detach().cpu().clone() if isinstance(argument, Tensor) else argument


def _of_one_sequence(
    args: Sequence[Any], out: Tensor, row: int
) -> tuple[list[Any], tuple[Tensor, ...], list[int], int]:
    """Return arguments, results, `where` and `rows` of an attention call, cut to one sequence."""
    q, k, v, layout, scores, *_ = args
    k, v, layout = by_rows(k, v, layout)
    first = sequence = 0
    while row >= first + layout.query_lens[sequence]:
        first += layout.query_lens[sequence]
        sequence += 1
    count = layout.query_lens[sequence]
    queries = slice(first, first + count)
    keys = layout.key_rows[sequence][: layout.key_lens[sequence]]
    told = [scores.scale, scores.window, scores.softcap]
    given = [q[queries], k[keys], v[keys], told, scores.sinks]
    return given, (out[queries],), [row - first], count


def plain(argument: Any) -> Any:
    """Return an argument that can be serialised; None for others, such as a function or ranks."""
    return argument if isinstance(argument, (Tensor, int, float, list)) else None


def write_evidence(evidence: Evidence, directory: Path, rank: int = 0) -> None:
    """Write the evidence of a rank, whole or not at all, with its arguments that are `plain`."""
    partial = directory / f"{uuid.uuid4().hex}.partial"
    arguments = [plain(argument) for argument in evidence.arguments]
    torch.save(asdict(replace(evidence, arguments=arguments)), partial)
    partial.replace(directory / f"{rank}{SUFFIX}")


def read_evidence(directory: Path) -> dict[int, Evidence]:
    """Return the evidence by rank; empty if the call has not come, or ranks of different engines
    made it last."""
    files = sorted(directory.glob(f"*{SUFFIX}"))
    found = {int(file.stem): Evidence(**torch.load(file)) for file in files}
    calls = {(evidence.rows, *evidence.where) for evidence in found.values()}
    return found if len(calls) == 1 else {}


def clear_evidence(directory: Path) -> None:
    """Remove the evidence of all ranks."""
    for file in directory.glob(f"*{SUFFIX}"):
        file.unlink()


class Together:
    """A gatherer of a call's tensors over a trainer's ranks; this base class gathers nothing.

    Methods are collective: all ranks that share a call call them alike.
    """

    def given(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of operator `name`, with sharded row arguments gathered."""
        return args

    def made(self, name: str, out: Any) -> Any:
        """Return the operator's result gathered: a tensor, or several."""
        return out

    def held(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the result of `given` with the other arguments gathered too: weights, and row
        offsets."""
        return args


ALL_HERE = Together()


@dataclass(slots=True, kw_only=True)
class Scope:
    """A module that is running."""

    module: str
    """The module's Hugging Face name."""

    fused: Mapping[str, Tensor | None] | None = None
    """The modules that it computes at once, and int64 the columns of its result for each."""

    expert_order: Tensor | None = None
    """int64 [T * k]: in experts, the (token, choice) of each row."""

    first_block: int = 0
    """In experts, the first of this rank's blocks of the sum over their intermediate axis."""

    has_halves: bool = False
    """In experts, whether the first product is gate and up, side by side."""

    chunks: int = 1
    """In attention, the number of equal parts of the rows that are computed one after another."""

    together: Together = ALL_HERE

    counts: Counter[str] = field(default_factory=Counter)

    def number(self, name: str) -> int:
        """Return the index of a call of an operator over all ranks; the chunks of attention count
        as one."""
        is_block = name == "grouped_partial_linear" and self.counts
        count = self.counts[name] + (self.first_block if is_block else 0)
        return count // self.chunks if name == "attention" else count

    def keys(self, name: str, keys: Tensor) -> Tensor:
        """Return the keys of the rows in this call of an operator."""
        if name != "attention":
            return keys
        return keys.chunk(self.chunks)[self.counts[name] % self.chunks]
