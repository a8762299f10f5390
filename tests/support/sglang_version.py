"""What another SGLang needs before it can be tried: its wheel, the hooks that are there, and its pins.

    python tests/support/sglang_version.py 0.5.24        # `make test-sglang VERSION=0.5.24` calls this

fetches the wheel into .sglang/0.5.24, says which hook moved, and writes requirements there in which what
that SGLang pins takes the place of ours. It ends with exit code 1 if a hook is not where it was.
"""

import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import PathDistribution, version
from pathlib import Path

from sglang_patches import status
from tests.support.sglang_hooks import differences

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"

CHOSEN_BY = {"tokenizers": "transformers"}
"""Packages of which another one takes few versions: with another version of that, not ours."""

_PIN = re.compile(r"^([\w.-]+)==(\S+)$", re.MULTILINE)


def fetch(wanted, directory):
    """Unpack the wheel of SGLang `wanted` below `directory`; where its package is."""
    unpacked = directory / "wheel"
    if not unpacked.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", directory, f"sglang=={wanted}"], check=True)
        (wheel,) = directory.glob("sglang-*.whl")
        partial = directory / "wheel.partial"
        zipfile.ZipFile(wheel).extractall(partial)
        partial.rename(unpacked)
        wheel.unlink()
    return unpacked


def pins(unpacked):
    """The versions that an SGLang pins with ==, by the name of the package in lower case."""
    (info,) = unpacked.glob("sglang-*.dist-info")
    found = {}
    for requirement in PathDistribution(info).requires or ():
        pinned = re.match(
            r"([\w.-]+)(?:\[.*?\])?==([\w.]+)$", requirement.partition(";")[0].strip()
        )
        if pinned and "extra ==" not in requirement:
            found[_normal(pinned[1])] = pinned[2]
    return found


def repinned(text, pinned):
    """Requirements in which packages of `pinned` have its versions; comments stay."""
    ours = {_normal(name): version for name, version in _PIN.findall(text)}
    moved = {name for name in ours.keys() & pinned.keys() if ours[name] != pinned[name]}

    def line(match):
        name = _normal(match[1])
        if CHOSEN_BY.get(name) in moved and name not in pinned:
            return match[1]
        return f"{match[1]}=={pinned.get(name, match[2])}"

    return _PIN.sub(line, text)


def _normal(name):
    return name.lower().replace("_", "-").replace(".", "-")


def write_requirements(directory, pinned):
    for file in REQUIREMENTS.iterdir():
        if file.suffix == ".txt":
            (directory / file.name).write_text(repinned(file.read_text(), pinned))
        elif file.is_file():
            (directory / file.name).write_bytes(file.read_bytes())


def main(wanted):
    if wanted not in status.SUPPORTED:
        print(
            f"VERSION={wanted}: must be one of {', '.join(status.SUPPORTED)}, or no engine starts. To "
            "try another, add it to SUPPORTED in sglang_patches/status.py."
        )
        return 2
    directory = ROOT / ".sglang" / wanted
    directory.mkdir(parents=True, exist_ok=True)
    unpacked = fetch(wanted, directory)
    pinned = pins(unpacked)
    write_requirements(directory, pinned | {"sglang": wanted})
    print(f"SGLang {wanted} pins torch {pinned['torch']}; tried with {version('torch')}.")
    pinned_sglang = Path(sysconfig.get_path("purelib"))
    missing, changed = differences(unpacked, pinned_sglang)
    for title, lines in (("moved", missing), ("takes other arguments", changed)):
        print(f"{title}: {len(lines)}", *lines, sep="\n  ", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
