"""What travels to a GPU's machine is what is called there, and arrives as it was packed."""

import struct
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.support.gpu.bundle import (
    FATBIN,
    LISTS,
    device_programs,
    is_called,
    slim,
)

KERNEL = "_ZN5flashMainloopFwdSm90ELi{}ENS_{}EfNS_4arch4Sm90{}"
BFLOAT16, HALF = "10bfloat16_t", "6half_t"


def kernel(dim=128, dtype=BFLOAT16, softcap=0, query_of_values=0, packed=1):
    """The name of one of FlashAttention-3's forward kernels."""
    switches = [0, 0, softcap, 1, 0, 0, query_of_values, 1, 1, packed, 0]
    return KERNEL.format(dim, dtype, "".join(f"ELb{switch}" for switch in switches)).encode()


def program(arch, body):
    return struct.pack("<HHIQIIHHI32x", 2, 1, 64, len(body), 0, 0, 0, 0, arch) + body


@pytest.fixture
def library(tmp_path):
    """Two groups of device programs in a file, as a linker leaves them."""
    called, other = b".text." + kernel() + b"\0", b".text." + kernel(dtype=HALF) + b"\0"
    groups = [program(80, called) + program(90, called), program(90, other) + program(90, called)]
    file = tmp_path / "flash_ops.abi3.so"
    file.write_bytes(
        b"host" + b"".join(FATBIN + struct.pack("<Q", len(g)) + g + b"more" for g in groups)
    )
    return file


def test_what_aligned_and_stock_attention_call_is_kept():
    assert is_called([kernel(64), kernel(128)]) and is_called([b"FlashAttnFwdCombine"])
    for others in (
        [],
        [b"CollectiveMainloopFwdSm80"],
        [kernel(256, packed=0)],
        [kernel(512)],
        [kernel(), kernel(dtype=HALF)],
        [kernel(softcap=1)],
        [kernel(query_of_values=1)],
    ):
        assert not is_called(others)


def test_other_programs_become_zeros_and_nothing_moves(library):
    before = library.read_bytes()
    dropped = slim(library)
    after = library.read_bytes()
    assert len(after) == len(before) and dropped > 0
    changed = [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y]
    programs = list(device_programs(bytearray(before)))
    assert [arch for arch, _, _ in programs] == [80, 90, 90, 90]
    gone = [programs[0], programs[2]]
    assert dropped == sum(stop - start for _, start, stop in gone)
    assert all(any(start <= i < stop for _, start, stop in gone) for i in changed)
    assert not any(any(after[start:stop]) for _, start, stop in gone)


def test_the_plug_in_is_found_there_as_an_installation_would_have_it():
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())[
        "project"
    ]
    stub = ConfigParser(delimiters="=")
    stub.read_string(LISTS["engine"]["stubs"]["onpolicy-0.1.0.dist-info/entry_points.txt"])
    wanted = {"console_scripts": project["scripts"], **project["entry-points"]}
    assert {name: dict(stub[name]) for name in stub.sections()} == wanted
    assert (
        f"Version: {project['version']}"
        in LISTS["engine"]["stubs"]["onpolicy-0.1.0.dist-info/METADATA"]
    )
