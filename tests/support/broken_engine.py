"""A real server of which one operator is broken in one layer, while a file is there.

What breaks it is the test's own code, run in the server's processes when they have imported the plug-in.
The fault stands beneath what records the engine, and after the self-check, which would find it.
"""

import os
from contextlib import contextmanager

import pytest

from tests.support.after_import import after_import
from tests.support.train_runs import ROOT

PLACES = {
    "qwen3": ("layers.1.mlp.down_proj", "weight", "row_parallel_linear"),
    "qwen3-moe": ("layers.1.mlp.experts", "down_proj", "grouped_partial_linear"),
}
"""By architecture: a module, its parameter, the operator that multiplies with it."""

IN_SERVERS = "{'sglang_patches.server_process', '--multiprocessing-fork'} & set(sys.orig_argv)"
"""A server, and what it spawns; not the process from which others are forked (fork_server.py)."""

CODE = """
from pathlib import Path
from sglang_patches import model, plugin
from tests.support.faults import rounded_in_between

FILE, MODULE, PARAMETER, NAME = {arguments!r}
make, align, weights = plugin.make_operators, model.align_modules, []

def make_operators(*args):
    operators = make(*args)
    right = getattr(operators, NAME)
    broken = rounded_in_between(right)
    def either(x, weight, *rest):
        is_meant = any(weight.data_ptr() == own.data_ptr() for own in weights)
        return (broken if is_meant and Path(FILE).exists() else right)(x, weight, *rest)
    setattr(operators, NAME, either)
    return operators

def align_modules(engine, *args):
    align(engine, *args)
    weights.append(getattr(engine.model.get_submodule(MODULE), PARAMETER))

plugin.make_operators, model.align_modules = make_operators, align_modules
"""


@contextmanager
def breakable_engines(architecture, directory):
    """Servers that are started inside can be broken; yields the file that does it."""
    file = directory / "broken"
    code = CODE.format(arguments=(str(file), *PLACES[architecture]))
    customize = after_import("sglang_patches.plugin", code, IN_SERVERS)
    (directory / "sitecustomize.py").write_text(customize)
    paths = [str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield file
