"""Runs the tests of what decides bits under other instruction sets, each in processes of its own.

    python tests/support/instruction_sets.py                          # all of SETTINGS, as CI does
    python tests/support/instruction_sets.py MKL_CBWR=AVX2 ...        # others, whatever comes into force

Libraries choose kernels by the processor, so what holds on one may not on the next. These variables
give some of the kernels of others. A setting has a variable for each of two libraries, which choose
apart from each other; give one alone to see with whose kernels a test fails. Three settings run side
by side, since some wait for servers. A setting that a library did not take is a failure. Intel's kernels
of MKL are chosen on Intel's processors alone; elsewhere `intel_kernels.c` answers MKL's question.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from onpolicy.contract import PORTABLE_KERNELS

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/onpolicy/ops",
    "--ignore=tests/onpolicy/ops/triton",  # an interpreter in numpy, and
    "--ignore=tests/onpolicy/ops/hopper",  # calls that are recorded
    "tests/onpolicy/models/test_policy.py",
    "tests/onpolicy/models/vision",
    "tests/parity",
    "tests/e2e/test_verify.py::test_no_token_differs_in_float32[qwen3-moe]",
)
VERIFIED = "test_negative_controls and (experts or router)"
"""Tests of what verify has."""
PORTABLE = "test_portable and (every_other_machine or process_on_other_kernels)"
"""Tests whose processes have an environment of their own, without the variables of PORTABLE_KERNELS:
under a setting of one of those they do what `make test` does, to the bit."""
INHERITED = "test_instruction_set"
"""Whether engines inherit variables. One that did not would have other digests, which every test with
an engine compares; kernels that MKL gives to Intel's processors alone are not among PORTABLE_KERNELS."""
SHARDS = "test_adapters and ranks"
"""Products of a rank's shards, which the self-check and test_row_parallel.py have too."""

PYTEST = ("-m", "pytest", "--hypothesis-profile=few", "--durations=3", "-p", "no:cacheprovider")
AVX2, AVX512 = "Intel(R) Advanced Vector Extensions 2", "Intel(R) AVX-512"


@dataclass(frozen=True)
class Setting:
    """Variables, and what the libraries must say of themselves under them."""

    variables: str
    says: tuple[str, ...] = ()
    intel: bool = False
    """Whether MKL must take the processor for one of Intel's."""
    needs: str = ""
    """A flag of /proc/cpuinfo."""

    @property
    def selection(self):
        """pytest's argument that leaves out what this setting changes nothing of."""
        is_theirs = self.values.keys() <= PORTABLE_KERNELS.keys() and not self.intel
        left_out = [VERIFIED, SHARDS, *[PORTABLE, INHERITED] * is_theirs]
        return "-k=" + " and ".join(f"not ({tests})" for tests in left_out)

    @property
    def values(self):
        return dict(pair.split("=", 1) for pair in self.variables.split())


SETTINGS = (
    Setting("MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2", says=("CNR:COMPATIBLE", "ATen AVX2")),
    Setting(
        "MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=default",
        says=(AVX2, "ATen DEFAULT"),
        intel=True,
    ),
    Setting(
        "MKL_ENABLE_INSTRUCTIONS=AVX512 ONEDNN_MAX_CPU_ISA=AVX2",
        says=(AVX512, "isa:Intel AVX2\n"),
        intel=True,
        needs="avx512f",
    ),
)

SIDE_BY_SIDE = 3

ASK = """
from onpolicy.compat.process import prepare_process
prepare_process()
import torch
import torch.nn.functional as F
print("ATen", torch.backends.cpu.get_cpu_capability(), flush=True)
with torch.backends.mkl.verbose(1), torch.backends.mkldnn.verbose(1):
    F.gelu(F.linear(torch.ones(64, 64), torch.ones(64, 64)))
"""


def intel_kernels(directory):
    """The variable under which MKL takes this processor for one of Intel's."""
    if "GenuineIntel" in Path("/proc/cpuinfo").read_text():
        return {}
    assert shutil.which("cc"), (
        "no C compiler for tests/support/intel_kernels.c: apt-get install gcc"
    )
    library = str(Path(directory, "intel_kernels.so"))
    source = str(Path(__file__).with_name("intel_kernels.c"))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": library}


def in_force(environment):
    """What ATen, MKL and oneDNN say of themselves."""
    answer = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    return answer.stdout


def run(setting, directory):
    """Run the tests; what went wrong, or None."""
    variables = setting.values
    if setting.intel:
        variables |= intel_kernels(directory)
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    said = in_force(environment)
    if missing := [each for each in setting.says if each not in said]:
        return f"not in force: {missing} is not in\n{said}"
    return None if _pass(setting, environment) else "tests failed"


def _pass(setting, environment):
    done = subprocess.run(
        [sys.executable, *PYTEST, *TESTS, setting.selection],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.splitlines()
    said = lines if done.returncode else lines[-1:]
    print("\n  ".join([f"{setting.variables}:", *said]), flush=True)
    return done.returncode == 0


def _can_run(setting):
    there = setting.needs in Path("/proc/cpuinfo").read_text()
    if not there:
        print(f"== {setting.variables}: left out, this processor has no {setting.needs}")
    return there


def _report(setting):
    """Run the tests and say how long they took; whether they passed."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        problem = run(setting, directory)
    seconds = time.monotonic() - start
    print(f"== {setting.variables}: {problem or 'passed'}, {seconds:.0f} s", flush=True)
    return problem is None


def main(arguments):
    if platform.machine() != "x86_64":
        print(f"The settings are those of x86 libraries, not of {platform.machine()}.")
        return 0
    settings = filter(_can_run, [Setting(text) for text in arguments] or SETTINGS)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        passed = list(pool.map(_report, settings))
    return passed.count(False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
