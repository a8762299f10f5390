"""Tensors of one call, copied so that the call can be repeated elsewhere."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onpolicy.explain.taps.rows import by_row, by_rows, cut

SUFFIX = ".evidence"

ATTENTION = {"attention", "paged_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The arguments and results of a call; for attention those of a single sequence: its queries,
    and the keys and values that they see."""

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


def _of_one_sequence(
    args: Sequence[Any], out: Tensor, row: int
) -> tuple[list[Any], tuple[Tensor, ...], list[int], int]:
    """Return arguments, results, `where` and `rows` of an attention call, cut to one sequence."""
    q, k, v, layout, scores, *rest = args
    k, v, layout = by_rows(k, v, layout)
    first = sequence = 0
    while row >= first + layout.query_lens[sequence]:
        first += layout.query_lens[sequence]
        sequence += 1
    count = layout.query_lens[sequence]
    queries = slice(first, first + count)
    keys = layout.key_rows[sequence][: layout.key_lens[sequence]]
    told = [scores.scale, scores.window, scores.softcap]
    given = [q[queries], k[keys], v[keys], told, *rest[:1]]
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


def _copied(argument: Any) -> Any:
    return argument.detach().cpu().clone() if isinstance(argument, Tensor) else argument
