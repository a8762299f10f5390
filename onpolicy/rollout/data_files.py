"""Rows of the files that hold prompts: those that the datasets package reads, read with pyarrow."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from onpolicy.errors import ConfigError, in_one_line
from onpolicy.system.reading import parse_json, read_json_object, read_text, require_file

Row = tuple[str, dict[str, Any]]
"""(where it stands, for messages; the fields)"""


def read_rows(path: Path, name: str) -> Iterator[Row]:
    """The rows of a file, or of a directory that `Dataset.save_to_disk` wrote; `name` is for messages.

    Raises ConfigError for a file of another kind, and for a row that is no object.
    """
    if path.is_dir():
        yield from _read_saved(path, name)
        return
    if path.suffix not in READERS:
        raise ConfigError(
            f"{name}: unknown kind {path.suffix!r}. Known: {', '.join(READERS)}, and a directory that "
            "save_to_disk of the datasets package wrote."
        )
    require_file(path, name)
    try:
        yield from READERS[path.suffix](path, name)
    except (pyarrow.ArrowException, OSError, csv.Error) as error:
        raise ConfigError(
            f"{name}: cannot be read ({in_one_line(error)}). Its end may be missing, or it may not be "
            f"a {path.suffix} file; write it again."
        ) from error


def _read_jsonl(path: Path, name: str) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{name}:{number}"
            try:
                row = parse_json(line.decode("utf-8-sig"))
            except ValueError as error:
                problem = f"not valid JSON ({error})" if line.strip() else "an empty line"
                raise ConfigError(f"{where}: {problem}. Every line must be an object.") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: {type(row).__name__}. Every line must be an object.")
            yield where, row


def _read_json(path: Path, name: str) -> Iterator[Row]:
    """An array of objects, or one object a line under this name."""
    text = read_text(path, name)
    if not text.lstrip().startswith("["):
        yield from _read_jsonl(path, name)
        return
    try:
        rows = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{name}: not valid JSON ({error}). Mend it, or get it again.") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ConfigError(
                f"{name}: row {number} is {json.dumps(row):.60}. Every row must be an object."
            )
        yield f"{name}: row {number}", row


def _read_csv(path: Path, name: str) -> Iterator[Row]:
    """Every field is text, as it stands there: no number loses its zeros."""
    rows = csv.DictReader(read_text(path, name).splitlines(keepends=True), strict=True)
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise ConfigError(
                f"{name}: row {number} has more fields, or fewer, than the header names. Put a field "
                "with commas in it between quotation marks."
            )
        yield f"{name}: row {number}", row


def _read_parquet(path: Path, name: str) -> Iterator[Row]:
    yield from _of_table(pyarrow.parquet.read_table(path), name)


def _read_arrow(path: Path, name: str) -> Iterator[Row]:
    """Arrow's stream, which datasets writes, or its file format."""
    with pyarrow.memory_map(str(path)) as data:
        try:
            reader = pyarrow.ipc.open_stream(data)
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(data)
        yield from _of_table(reader.read_all(), name)


def _of_table(table: pyarrow.Table, name: str) -> Iterator[Row]:
    for number, row in enumerate(table.to_pylist(), 1):
        yield f"{name}: row {number}", row


def _read_saved(directory: Path, name: str) -> Iterator[Row]:
    splits, state = directory / "dataset_dict.json", directory / "state.json"
    if splits.is_file():
        names = read_json_object(splits, f"{name}/{splits.name}").get("splits", [])
        raise ConfigError(
            f"{name}: holds several splits ({', '.join(map(str, names))}). Give one of them, such as "
            f"{directory / 'train'}."
        )
    if not state.is_file():
        raise ConfigError(
            f"{name}: is a directory without state.json, so that save_to_disk of the datasets package "
            "has not written it. Give the path of a file."
        )
    files = read_json_object(state, f"{name}/{state.name}").get("_data_files", [])
    for file in files:
        path = directory / file["filename"]
        yield from read_rows(path, f"{name}/{path.name}")


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
"""What reads a file, by the end of its name."""
