"""The package as others get it: built, installed without the checkout, and with what it names alone."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sglang_patches.status import SUPPORTED
from tests.support.tiny import make_checkpoint

ROOT = Path(__file__).parents[1]
NAMES = {"onpolicy", "sglang_patches", "fallback_correction"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
UV = Path(sys.executable).with_name("uv")

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist of the files that this checkout has, and the wheel that is built from it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    without_caches = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in NAMES | {"tests", "benchmarks"}:
        shutil.copytree(ROOT / name, source / name, ignore=without_caches)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def folders(names):
    return {Path(name).parts[0] for name in names if len(Path(name).parts) > 1}


def test_the_wheel_and_the_sdist_hold_the_three_packages_and_nothing_that_others_have(built):
    """A folder `benchmarks` or `tests` of a wheel replaces another project's (cdflib issue 273)."""
    sdist, wheel = built
    (info,) = folders(zipfile.ZipFile(wheel).namelist()) - NAMES
    assert info.endswith(".dist-info")
    with tarfile.open(sdist) as file:
        inner = [name.partition("/")[2] for name in file.getnames()]
    assert folders(filter(None, inner)) == NAMES | {"onpolicy.egg-info"}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The commands of an environment with the wheel, and with the packages of this one but its
    checkout: a folder in a .pth file is searched, and its own .pth files are not read."""
    place = tmp_path_factory.mktemp("installed")
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    libraries = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    (libraries / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", built[1]], check=True)
    return place / "bin"


def call(program, *argv, directory):
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(directory)}
    return subprocess.run(
        [program, *argv], cwd=directory, env=environment, capture_output=True, text=True
    )


def test_an_installed_command_verifies_a_model_outside_a_checkout(installed, tmp_path):
    """It also lets torchvision's wheel be imported beside a CPU build of torch, where nothing in the
    environment does (pytorch/vision issue 9085)."""
    helped = call(installed / "onpolicy", "--help", directory=tmp_path)
    assert helped.returncode == 0 and "verify" in helped.stdout
    where = call(installed / "python", "-c", "import onpolicy; print(onpolicy.__file__)",
        directory=tmp_path)  # fmt: skip
    assert Path(where.stdout).is_relative_to(installed.parent)
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3")
    flags = ["--hf-checkpoint", str(checkpoint), "--num-prompts", "8", "--json", "verified.json"]
    flags += ["--actor-num-ranks-per-node", "2", "--max-new-tokens", "16", "--cpu-threads", "1"]
    done = call(installed / "onpolicy", "verify", *flags, directory=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"num_mismatched_tokens": 0' in (tmp_path / "verified.json").read_text()


def closure(requirements):
    """The packages that an installer brings for these, in all of which no extra is asked for."""
    found, waiting = set(), [Requirement(text) for text in requirements]
    while waiting:
        needed = waiting.pop()
        name = canonicalize_name(needed.name)
        if name not in found and (not needed.marker or needed.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += [Requirement(text) for text in requires(name) or []]
    return found


ALONE = """
import sys
from onpolicy.cli.main import main

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

missing = set(sys.argv.pop(1).split(","))
sys.meta_path.insert(0, Missing())
sys.exit(main())
"""
"""A command of an environment that lacks some modules."""

NO_EXTRA = {
    "data data.jsonl --rm-type math": "rows        1",
    "report .": "RUN=.: has no metrics.jsonl",
    "episodes .": "RUN=.: has no config.json",
}


def alone(*commands, directory):
    """Calls these commands where only what the package names is installed."""
    named = closure(PROJECT["project"]["dependencies"]) | {"onpolicy"}
    assert not named & {"torch", "transformers"}
    others = [
        module
        for module, owners in packages_distributions().items()
        if not named & {canonicalize_name(owner) for owner in owners}
    ]
    return subprocess.run(
        [sys.executable, "-c", ALONE, ",".join(others), *commands],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("command", NO_EXTRA)
def test_what_needs_no_extra_runs_on_what_the_package_names(command, tmp_path):
    """A package that is in every checkout's environment by chance is missed by whoever installs the
    wheel (psrecord issue 14: psutil)."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    done = alone(*command.split(), directory=tmp_path)
    assert NO_EXTRA[command] in done.stdout + done.stderr, done.stderr


def test_a_command_whose_extra_is_missing_says_how_to_install_it(tmp_path):
    done = alone("verify", "--hf-checkpoint", "x", directory=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "torch is not installed" in done.stderr and "'onpolicy[cpu]'" in done.stderr
    assert f"sglang=={SUPPORTED[-1]}" in done.stderr


def pins(lines):
    found = {}
    for line in lines:
        if match := re.match(r"([\w.-]+)==(\S+)$", line.partition(" #")[0].strip()):
            found[canonicalize_name(match[1])] = match[2]
    return found


def test_the_extra_of_a_cpu_is_what_the_tests_are_run_with():
    files = [ROOT / "requirements" / name for name in ("cpu.txt", "cpu-no-deps.txt")]
    tested = pins(line for file in files for line in file.read_text().splitlines())
    makefile = (ROOT / "Makefile").read_text()
    tested["torch"] = re.search(r"^TORCH \?= (\S+)$", makefile, re.MULTILINE)[1]
    engine = PROJECT["dependency-groups"]["engine"]
    extra = {canonicalize_name(Requirement(text).name) for text in EXTRAS["cpu"]}
    assert extra - tested.keys() == set()
    assert pins([*EXTRAS["cpu"], *engine]).items() <= tested.items()
    assert not [text for text in EXTRAS["cpu"] if Requirement(text).name == "sglang"]


def test_the_lock_of_uv_is_of_this_project_and_refuses_what_it_would_leave_without_kernels():
    def uv(*argv):
        return subprocess.run([UV, *argv], cwd=ROOT, capture_output=True, text=True)

    checked = uv("lock", "--check", "--offline")
    assert checked.returncode == 0, f"uv lock\n{checked.stderr}"
    assert uv("sync", "--dry-run", "--locked", "--offline", "--extra", "cpu").returncode == 0
    refused = uv("sync", "--dry-run", "--locked", "--offline", "--extra", "gpu")
    assert refused.returncode != 0 and "incompatible" in refused.stderr
