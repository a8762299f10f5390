"""Carries packages to a machine with a GPU and no network, in pieces of a size that can be sent.

    python -m tests.support.gpu.carry pack OUT_DIR WHEEL...    where the wheels are
    python -m tests.support.gpu.carry unpack OUT_DIR DEST      there; then PYTHONPATH=DEST

Every wheel is cut into pieces of at most --piece-mb; a manifest holds the checksum of each piece and of
each wheel. `unpack` checks all of them before it puts a byte into DEST, and takes the wheels apart there
as zip files, which is what installing a wheel comes to where nothing is compiled. Needs Python alone.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

MANIFEST = "manifest.json"
PIECE_MB = 58


class DamagedError(Exception):
    """A piece is missing, or is not what was packed."""


def pack(out: Path, wheels: Sequence[Path], piece_bytes: int) -> list[Path]:
    """Cut the wheels into pieces in `out`, which must be empty or absent; returns the pieces."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty. Give another directory.")
    files, pieces = {}, []
    for wheel in sorted(wheels):
        data = wheel.read_bytes()
        names = {}
        for i, start in enumerate(range(0, len(data), piece_bytes)):
            piece = out / f"{wheel.name}.{i:03d}"
            piece.write_bytes(data[start : start + piece_bytes])
            names[piece.name] = _sha256(data[start : start + piece_bytes])
            pieces.append(piece)
        files[wheel.name] = {"sha256": _sha256(data), "pieces": names}
    (out / MANIFEST).write_text(json.dumps(files, indent=1) + "\n")
    return pieces


def unpack(source: Path, dest: Path) -> list[str]:
    """Put all wheels together and take them apart in `dest`; returns their names.

    Raises DamagedError before `dest` is touched.
    """
    files = json.loads((source / MANIFEST).read_text())
    wheels = {}
    for name, file in files.items():
        data = b"".join(_piece(source / piece, sha) for piece, sha in file["pieces"].items())
        if _sha256(data) != file["sha256"]:
            raise DamagedError(f"{name}: is not what was packed. Pack it again.")
        wheels[name] = data
    for data in wheels.values():
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            wheel.extractall(dest)
    return list(wheels)


def _piece(path: Path, sha256: str) -> bytes:
    if not path.exists():
        raise DamagedError(f"{path.name}: is missing. Copy it here.")
    data = path.read_bytes()
    if _sha256(data) != sha256:
        raise DamagedError(f"{path.name}: is damaged. Copy it here again.")
    return data


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main(argv: Sequence[str]) -> int:
    """Pack or unpack; 1 with a message if it cannot be done."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("out", type=Path)
    packing.add_argument("wheels", type=Path, nargs="+")
    packing.add_argument("--piece-mb", type=int, default=PIECE_MB)
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("source", type=Path)
    unpacking.add_argument("dest", type=Path)
    given = parser.parse_args(argv)
    try:
        if given.command == "pack":
            for piece in pack(given.out, given.wheels, given.piece_mb * 10**6):
                print(f"{piece.stat().st_size:>12,}  {piece.name}")
        else:
            print("\n".join(unpack(given.source, given.dest)))
    except (DamagedError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
