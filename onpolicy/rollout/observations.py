"""What functions observed that is no function of the tokens: written down before it is used.

    {"number": 12, "key": "3/0//1/9f86d081884c7d65", "value": {"temperature": 21.5}}

The key says which episode of the group, which attempt at it, which branch, the how-manieth observation
of the branch, and after which tokens: so a run that goes on or is repeated gets a value where it stands
as the one before it did, and nowhere else. That an attempt failed is such a value too (`failures.py`).
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
    """One text for all that a value belongs to."""
    tokens = hashlib.blake2b(json.dumps([*token_ids]).encode(), digest_size=8).hexdigest()
    return f"{index}/{attempt}/{'.'.join(branch)}/{count}/{tokens}"


class Observations:
    """What a run has observed. `file`: where they are written, and those from before are; those of the
    run that is `repeated`, if there are none."""

    def __init__(self, file: Path | None = None, repeated: Path | None = None):
        self._file = file
        self._known = defaultdict[int, dict[str, Json]](dict)
        if file is not None:
            if repeated is not None and repeated.exists() and not file.exists():
                files.write(file, repeated.read_bytes())
            self._read(file)

    def _read(self, file: Path) -> None:
        """Know what a run wrote there; a line that a kill cut off is none."""
        for line in file.read_bytes().splitlines() if file.exists() else ():
            try:
                record = json.loads(line)
                self._known[record["number"]][record["key"]] = record["value"]
            except (ValueError, KeyError, TypeError):
                continue

    async def observe(self, number: int, key: str, make: Callable[[], Awaitable[Json]]) -> Json:
        """What is known under the key; else what `make` returns, written down first.

        Raises TypeError or ValueError for what JSON cannot say.
        """
        if key not in self._known[number]:
            self.note(number, key, await make())
        return self._known[number][key]

    def note(self, number: int, key: str, value: Json) -> None:
        """Write down what is to be known under the key. Raises as `observe`."""
        text = json.dumps(value, allow_nan=False)
        if self._file is not None:
            record = f'{{"number": {number}, "key": {json.dumps(key)}, "value": {text}}}'
            files.append(self._file, record.encode())
        self._known[number][key] = json.loads(text)

    def known(self, number: int, key: str) -> Json:
        """What is known under the key; None if nothing is."""
        return self._known[number].get(key)

    def forget(self, numbers: Iterable[int]) -> None:
        """Those groups are complete, and are not begun again."""
        for number in numbers:
            self._known.pop(number, None)

    def of(self, number: int) -> dict[str, Json]:
        """What is known of a group."""
        return dict(self._known.get(number, {}))

    def know(self, number: int, values: dict[str, Json]) -> None:
        """Values from a checkpoint."""
        self._known[number].update(values)
