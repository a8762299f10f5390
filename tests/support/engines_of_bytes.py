"""Real engines on a CPU whose linears of rounded inputs multiply bytes, by the stand-in for DeepGEMM."""

import os
from contextlib import contextmanager

import pytest

from onpolicy.ops import backends
from onpolicy.ops.hopper import gemm
from onpolicy.training import policy_trainer
from tests.support import checked_once
from tests.support.after_import import after_import
from tests.support.train_runs import ROOT

CODE = """
import os
from collections import deque
from dataclasses import fields
from pathlib import Path
from onpolicy.ops import backends

class Noted(deque):
    def append(self, call):
        Path({directory!r}, str(os.getpid())).touch()

class OfBytes(type(backends.CPU)):
    def make(self, threads):
        from onpolicy.ops.hopper import gemm
        from tests.support.bytes_on_cpu import BytesOnCpu, add_blocks
        from tests.support.recorded_kernels import deep_gemm
        module = deep_gemm("0.2.5", Noted())
        gemm.loaded, gemm.add_blocks = lambda: module, add_blocks
        return BytesOnCpu(threads)

known = {{each.name: getattr(backends.CPU, each.name) for each in fields(backends.CPU)}}
of_bytes = OfBytes(**{{**known, "multiplies_bytes": True}})
backends.BACKENDS = (of_bytes, *(x for x in backends.BACKENDS if x.name != "cpu"))
"""


@contextmanager
def engines_of_bytes(directory):
    """The CPU's operators are such here, and in processes that are started inside; yields a folder with
    a file for each process that has multiplied bytes."""
    (folder := directory / "multiplied").mkdir()
    code = CODE.format(directory=str(folder))
    customize = after_import("onpolicy.ops.backends", code)
    (directory / "sitecustomize.py").write_text(customize)
    paths = [str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setattr(policy_trainer, "checked_operators", checked_once._check)  # as they are now
        for module, name in ((backends, "BACKENDS"), (gemm, "loaded"), (gemm, "add_blocks")):
            patch.setattr(module, name, getattr(module, name))  # and put back in the end
        exec(code, {})
        yield folder
