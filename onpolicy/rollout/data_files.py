"""Readers of prompt files: the formats of the datasets package, read with pyarrow."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
import pyarrow.parquet
from pyarrow import types

from onpolicy.errors import ConfigError, in_one_line
from onpolicy.system.files import parse_json, read_json_object, read_text, require_file

T = TypeVar("T")

ARROW = ".arrow"

Row = tuple[str, dict[str, Any]]
"""(location for messages, fields)"""

ROWS_AT_ONCE = 1024
"""Rows of a table held as Python objects at a time; they take many times a column's bytes."""

LARGEST_FIELD = 2**31 - 1
"""Most characters of a CSV field, of which Python's reader takes 131,072 by default."""


def read_rows(path: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a file, or of a directory that `Dataset.save_to_disk` wrote.

    `name` is for messages. Raises ConfigError for other files, and a row that is no object.
    """
    if path.is_dir():
        yield from _read_saved(path, name)
        return
    if path.suffix not in READERS:
        raise ConfigError(
            f"{name}: unknown kind {path.suffix!r}. Known: {', '.join(READERS)}, and a directory that "
            "save_to_disk of the datasets package wrote. A data set of the hub is OWNER/NAME:SPLIT, "
            "such as openai/gsm8k:train."
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
    """Yield rows from an array of objects, or from one object per line in a file with this ending."""
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
    """Yield rows whose fields are all text as written: no number loses its zeros."""
    csv.field_size_limit(LARGEST_FIELD)
    # Without newline translation, so that only what ends a line of CSV ends a row.
    rows = csv.DictReader(io.StringIO(read_text(path, name), newline=""), strict=True)
    _require_different(rows.fieldnames or (), name)
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise ConfigError(
                f"{name}: row {number} has more fields, or fewer, than the header names. Put a field "
                "with commas in it between quotation marks."
            )
        yield f"{name}: row {number}", row


def _require_different(names: Sequence[str], name: str) -> None:
    if twice := sorted({each for each in names if names.count(each) > 1}):
        raise ConfigError(
            f"{name}: two columns have the name {twice[0]!r}, and a row holds one. Rename the other."
        )


def _read_parquet(path: Path, name: str) -> Iterator[Row]:
    with pyarrow.parquet.ParquetFile(path) as file:
        yield from _of_batches(file.schema_arrow, file.iter_batches(ROWS_AT_ONCE), name)


def _read_arrow(path: Path, name: str) -> Iterator[Row]:
    """Yield the rows of Arrow's stream format, which datasets writes, or of its file format."""
    with pyarrow.memory_map(str(path)) as data:
        try:
            reader = pyarrow.ipc.open_stream(data)
            batches = iter(reader)
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(data)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        yield from _of_batches(reader.schema, batches, name)


def _of_batches(
    schema: pyarrow.Schema, batches: Iterable[pyarrow.RecordBatch], name: str
) -> Iterator[Row]:
    """Yield the rows of a table, converting a few to Python objects at a time."""
    _require_different(schema.names, name)
    slices = (
        batch.slice(start, ROWS_AT_ONCE)
        for batch in batches
        for start in range(0, batch.num_rows, ROWS_AT_ONCE)
    )
    rows = itertools.chain.from_iterable(each.to_pylist() for each in slices)
    for number, row in enumerate(rows, 1):
        yield (
            f"{name}: row {number}",
            {field.name: _as_written(row[field.name], field.type) for field in schema},
        )


def _as_written(value: Any, kind: pyarrow.DataType) -> Any:
    """Return a value as JSON would hold it.

    Arrow gives an object the fields of all others in its column, as nulls, and a 32-bit number the
    digits of a 64-bit one.
    """
    if value is None:
        return None
    if types.is_struct(kind):
        return {
            field.name: _as_written(value[field.name], field.type)
            for field in kind
            if value[field.name] is not None
        }
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_as_written(each, kind.value_type) for each in value]
    if types.is_map(kind):
        return {key: _as_written(each, kind.item_type) for key, each in value}
    if types.is_float32(kind) or types.is_float16(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    return value


def _read_saved(directory: Path, name: str) -> Iterator[Row]:
    """Yield the rows of the files that state.json names, all of which lie beside it."""
    splits, state = directory / "dataset_dict.json", directory / "state.json"
    if splits.is_file():
        where = f"{name}/{splits.name}"
        names = _list_of(str, read_json_object(splits, where).get("splits"), f"{where}: splits")
        raise ConfigError(
            f"{name}: holds several splits ({', '.join(names)}). Give one of them, such as "
            f"{directory / 'train'}."
        )
    if not state.is_file():
        raise ConfigError(
            f"{name}: is a directory without state.json, so that save_to_disk of the datasets package "
            "has not written it. Give the path of a file."
        )
    where = f"{name}/{state.name}: _data_files"
    found = read_json_object(state, f"{name}/{state.name}").get("_data_files")
    for entry in _list_of(dict, found, where):
        (file,) = _list_of(str, [entry.get("filename")], f"{where}: filename")
        if not file.endswith(ARROW) or Path(file).name != file:
            raise ConfigError(
                f"{where}: filename={file!r}: must be the name of an {ARROW} file in this directory. "
                "Write the data again with save_to_disk."
            )
        require_file(directory / file, f"{name}/{file}")
        yield from read_rows(directory / file, f"{name}/{file}")


def _list_of(kind: type[T], value: Any, where: str) -> list[T]:
    """Return `value` after checking that it is a list of `kind`: others write these files."""
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise ConfigError(
            f"{where}: is {json.dumps(value):.60}, and save_to_disk of the datasets package writes a "
            f"list of {'names' if kind is str else 'objects'}. Write the data again with it."
        )
    return value


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ARROW: _read_arrow,
}
"""The reader of each file name extension."""
