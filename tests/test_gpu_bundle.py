"""What travels to a GPU's machine is what is called there, and arrives as it was packed."""

import os
import struct
import tarfile
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.support.gpu.bundle import (
    FATBIN,
    LISTS,
    device_programs,
    is_called,
    pack,
    prune,
    slim,
    unpack,
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


@pytest.mark.parametrize(
    "names, expected",
    [
        ([kernel()], True),
        ([kernel(64), kernel(128)], True),
        ([kernel(256)], True),
        ([kernel(256, packed=0)], False),
        ([kernel(512)], False),
        ([kernel(dtype=HALF)], False),
        ([kernel(), kernel(dtype=HALF)], False),
        ([kernel(softcap=1)], False),
        ([kernel(query_of_values=1)], False),
        ([b"FlashAttnFwdCombine"], True),
        ([b"CollectiveMainloopFwdSm80"], False),
        ([], False),
    ],
)
def test_what_aligned_and_stock_attention_call_is_kept(names, expected):
    assert is_called(names) is expected


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


def test_what_arrives_is_what_was_packed(tmp_path):
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing/__init__.py", "VALUE = 1\n")
        archive.writestr("thing/tests/test_thing.py", "")
        tool = zipfile.ZipInfo("thing/tool")
        tool.external_attr = 0o100755 << 16
        archive.writestr(tool, "#!/bin/sh\n")
    unpack([wheel], tmp_path / "site")
    prune(
        tmp_path / "site",
        {"without": ["thing/tests"], "stubs": {"other/__init__.py": "STUB = 1\n"}},
    )
    pack(tmp_path / "site", tmp_path / "site.tar.xz")
    with tarfile.open(tmp_path / "site.tar.xz") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    found = {
        str(p.relative_to(tmp_path / "there"))
        for p in (tmp_path / "there").rglob("*")
        if p.is_file()
    }
    assert found == {"thing/__init__.py", "thing/tool", "other/__init__.py"}
    assert os.access(tmp_path / "there/thing/tool", os.X_OK)


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
