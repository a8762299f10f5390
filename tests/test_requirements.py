"""The extras can be installed as pyproject.toml names them, and tests compile with what they install."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

PYTHONS = ["3.11", "3.12", "3.13"]
BESIDE = ["megatron", "agents"]
"""Extras that can be installed beside the one of a GPU."""

COMPILER = {"nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-nvvm"}


def resolve(requirements, *arguments):
    """uv's choice on a GPU's machine, which has glibc 2.34: every package and its version."""
    # Without [tool.uv], which leaves out what a GPU needs.
    command = [UV, "pip", "compile", "--no-config", "--quiet", "--no-header", "--no-annotate"]
    command += [*arguments, "--python-platform", "x86_64-manylinux_2_34"]
    return subprocess.run(
        [*command, requirements],
        cwd=ROOT,
        capture_output=True,
        text=True,
        input="xxhash",
    )


@pytest.fixture(scope="module", autouse=True)
def index():
    if UV is None:
        pytest.skip("uv is not installed")
    if resolve("-").returncode:
        pytest.skip("no package index can be reached")


@pytest.fixture(scope="module")
def resolved(index):
    """Version by package for an extra and a Python: asked for at once, since answers are waited for."""

    def versions(extra, python):
        extras = ("--extra", "gpu", "--extra", extra)
        done = resolve("pyproject.toml", "--python-version", python, *extras)
        assert done.returncode == 0, done.stderr
        return dict(line.split("==") for line in done.stdout.split() if "==" in line)

    with ThreadPoolExecutor() as pool:
        asked = {each: pool.submit(versions, *each) for each in itertools.product(BESIDE, PYTHONS)}
        yield lambda *each: asked[each].result()


@pytest.mark.parametrize("python", PYTHONS)
def test_the_gpu_extra_can_be_installed_and_megatron_beside_it(resolved, python):
    versions = resolved("megatron", python)
    assert {"sglang", "sglang-kernel", "sgl-deep-gemm", "megatron-core"} <= versions.keys()
    toolkit = versions["nvidia-cuda-runtime"].split(".")[:2]
    assert all(versions[package].split(".")[:2] == toolkit for package in COMPILER)
    assert versions["triton"] == pinned("triton")


@pytest.mark.parametrize("python", PYTHONS)
def test_the_agents_extra_can_be_installed_beside_the_gpu_extra(resolved, python):
    versions = resolved("agents", python)
    assert {"sglang", "mini-swe-agent"} <= versions.keys()


def pinned(package):
    pins = (ROOT / "requirements/cpu-no-deps.txt").read_text()
    return re.search(rf"^{package}==(\S+)$", pins, re.MULTILINE)[1]


def test_the_supported_pythons_are_those_that_are_resolved():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {c.rpartition(" ")[2] for c in project["classifiers"] if "Python :: 3." in c}
    assert project["requires-python"] == ">=3.11" and named == set(PYTHONS)
