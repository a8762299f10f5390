"""Packages that travel in pieces arrive whole, or not at all."""

import random
import subprocess
import sys
import zipfile

import pytest

from tests.support.gpu.carry import MANIFEST, DamagedError, main, pack, unpack


@pytest.fixture
def wheels(tmp_path):
    """Two wheels, one of several pieces."""
    made = []
    for name, size in (("small", 10), ("large", 5000)):
        wheel = tmp_path / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}/__init__.py", f"SIZE = {size}\n")
            archive.writestr(f"{name}/data", random.Random(0).randbytes(size))
        made.append(wheel)
    return made


def test_what_arrives_can_be_imported(tmp_path, wheels, capsys):
    assert main(["pack", str(tmp_path / "out"), *map(str, wheels)]) == 0
    assert main(["unpack", str(tmp_path / "out"), str(tmp_path / "dest")]) == 0
    assert "large-1.0-py3-none-any.whl" in capsys.readouterr().out
    code = "import small, large; print(small.SIZE + large.SIZE)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "dest", capture_output=True, text=True
    )
    assert done.stdout == "5010\n"


def test_no_piece_is_larger_than_asked(tmp_path, wheels):
    pieces = pack(tmp_path / "out", wheels, 1000)
    assert len(pieces) > 5 and max(piece.stat().st_size for piece in pieces) <= 1000
    unpack(tmp_path / "out", tmp_path / "dest")
    assert (tmp_path / "dest/large/data").read_bytes() == random.Random(0).randbytes(5000)


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_damaged_piece_is_named_and_nothing_is_unpacked(tmp_path, wheels, damage, capsys):
    piece = pack(tmp_path / "out", wheels, 1000)[2]
    if damage == "missing":
        piece.unlink()
    else:
        piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedError, match=piece.name):
        unpack(tmp_path / "out", tmp_path / "dest")
    assert main(["unpack", str(tmp_path / "out"), str(tmp_path / "dest")]) == 1
    assert piece.name in capsys.readouterr().err
    assert not (tmp_path / "dest").exists()


def test_nothing_is_packed_among_other_files(tmp_path, wheels):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MANIFEST).touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        pack(tmp_path / "out", wheels, 1000)
