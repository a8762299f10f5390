"""Observations of functions, values that are no function of the tokens, written down before use.

{"number": 12, "key": "3/0//1/9f86d081884c7d65", "value": {"temperature": 21.5}}

The key holds the index of the episode in its group, the attempt, the branch, the index of the
observation in the branch, and a hash of the tokens before it: so a run that is resumed or repeated
gets a value exactly where the first run did. Failures of attempts are such values too
(`failures.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from onpolicy.system import files

Json = Any


def observation_key(
    index: int, attempt: int, branch: Sequence[str], count: int, token_ids: Sequence[int]
) -> str:
    """Return the key under which a value is stored."""
    tokens = hashlib.blake2b(json.dumps([*token_ids]).encode(), digest_size=8).hexdigest()
    return f"{index}/{attempt}/{'.'.join(branch)}/{count}/{tokens}"


class Observations:
    """The observations of a run. `file`: where they are written, and earlier ones read from; if it
    does not exist, it starts as a copy of the file of the `repeated` run."""

    def __init__(self, file: Path | None = None, repeated: Path | None = None):
        self._file = file
        self._known = defaultdict[int, dict[str, Json]](dict)
        if file is not None:
            if repeated is not None and repeated.exists() and not file.exists():
                files.write(file, repeated.read_bytes())
            self._read(file)

    def _read(self, file: Path) -> None:
        """Read the observations in a file; skip a line that a kill cut off."""
        for line in file.read_bytes().splitlines() if file.exists() else ():
            try:
                record = json.loads(line)
                self._known[record["number"]][record["key"]] = record["value"]
            except (ValueError, KeyError, TypeError):
                continue

    async def observe(self, number: int, key: str, make: Callable[[], Awaitable[Json]]) -> Json:
        """Return the value under the key, or else the result of `make`, written down first.

        Raises TypeError or ValueError for a value that JSON cannot hold.
        """
        if key not in self._known[number]:
            self.note(number, key, await make())
        return self._known[number][key]

    def note(self, number: int, key: str, value: Json) -> None:
        """Write down a value under the key. Raises as `observe`."""
        text = json.dumps(value, allow_nan=False)
        if self._file is not None:
            record = f'{{"number": {number}, "key": {json.dumps(key)}, "value": {text}}}'
            files.append(self._file, record.encode())
        self._known[number][key] = json.loads(text)

    def known(self, number: int, key: str) -> Json:
        """Return the value under the key; None if there is none."""
        return self._known[number].get(key)

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the observations of complete groups, which are not begun again."""
        for number in numbers:
            self._known.pop(number, None)

    def of(self, number: int) -> dict[str, Json]:
        """Return the observations of a group."""
        return dict(self._known.get(number, {}))

    def know(self, number: int, values: dict[str, Json]) -> None:
        """Add observations from a checkpoint."""
        self._known[number].update(values)
