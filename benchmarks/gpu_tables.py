"""Tables of benchmarks/gpu.md, from the records of the GPUs.

python -m benchmarks.gpu_tables    # writes them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

from onpolicy.ops.triton.linear import ENOUGH_TILES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "common"))

import page_tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "benchmarks" / "gpu.md"

BACKENDS = ("triton", "hopper")

Record = dict[str, Any]


def read(name: str) -> Record:
    """Return a record. Example: read("gpu_ops")"""
    record: Record = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def with_tables(page: str) -> str:
    """Return the page with the tables of the records."""
    titles = ("operator", "of", "rows", "beside", *BACKENDS)
    tables = {
        "operators": page_tables.table(titles, speeds(read("gpu_ops")["cases"])),
        "tiles": tiles(read("gpu_linear_tiles")["rows"]),
        "keys": key_gradient(read("gpu_key_gradient")["rows"]),
    }
    for mark, text in tables.items():
        page = page_tables.between(page, mark, text)
    return page


def line_of(case: Record) -> tuple[str, str, str]:
    """Return the line in which a case stands; models and sizes of pages share it."""
    name = case["where"].split()[1]
    is_attention = case["operator"].startswith("attention")
    place = case["where"].partition(", ")[2] if is_attention else name * name[0].isalpha()
    return case["operator"], place, f"{case['rows']:,}"


def speeds(cases: list[Record]) -> Iterator[list[str]]:
    """Yield each line, with each backend's least and largest speed relative to each reference."""
    found: dict[tuple[str, ...], list[list[float]]] = {}
    for case in sorted(cases, key=lambda case: (case["operator"], case["rows"])):
        variants = [case["variants"][name]["speed_over"] for name in BACKENDS]
        for other in variants[0]:
            line = found.setdefault((*line_of(case), other), [[], []])
            for ratios, variant in zip(line, variants, strict=True):
                ratios.append(variant[other])
    for group, line in found.items():
        ends = ((f"{min(ratios):.2f}", f"{max(ratios):.2f}") for ratios in line)
        yield [*group, *(low if low == high else f"{low} to {high}" for low, high in ends)]


def chosen_tile(row: Record) -> str:
    """Return the tile of `choose_tile` on a Hopper GPU (`onpolicy/ops/triton/linear.py`)."""
    many = ceil(row["M"] / 128) * ceil(row["N"] / 128) >= ENOUGH_TILES
    return "128x128" if row["M"] > 64 and many else "64x32"


def tiles(rows: list[Record]) -> str:
    """Return the speed of Triton's linear relative to cuBLAS, by its sizes and rows."""
    counts = sorted({row["M"] for row in rows})
    found: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row["M"]):
        cells = found.setdefault(f"{row['N']:,} x {row['K']:,}", [])
        cells.append(f"{row['cublas'] / row[chosen_tile(row)]:.2f}")
    return page_tables.table(
        ("outputs x inputs", *(f"{count:,} rows" for count in counts)),
        ([sizes, *cells] for sizes, cells in found.items()),
    )


def key_gradient(rows: list[Record]) -> str:
    """Return the time of a backward pass by the tile and the stages of its kernel."""
    found: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: (row["ROWS"], row["num_stages"])):
        queries = f"{row['ROWS']} queries, {row['num_stages']} stage{'s' * (row['num_stages'] > 1)}"
        cell = f"{row['ms']:.3f} ms, {row['differing']} of {row['of']}"
        found.setdefault(queries, []).append(cell)
    cases = dict.fromkeys(row["case"] for row in rows)
    return page_tables.table(("tile", *cases), ([tile, *cells] for tile, cells in found.items()))


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()
