"""A forked process is, to itself and to the one that asked for it, as one that was started."""

import json
import os
import subprocess
import sys

import pytest

import tests.support.forked_processes as forked_processes_module
from tests.support.forked_processes import forked_processes

pytestmark = pytest.mark.long

LOOKS = """
import json, os, sys, threading
import onpolicy.run.loop, torch
seen = dict(
    arguments=sys.argv, path=sys.path, name=__name__, directory=os.getcwd(), parent=os.getppid(),
    leads=os.getsid(0) == os.getpid(), environment=dict(os.environ), input=sys.stdin.read(),
    threads=torch.get_num_threads(),
    handles=sorted(os.listdir("/proc/self/fd"))[:3], started=threading.active_count(),
)
print(json.dumps(seen))
print("to standard error", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "looks.py").write_text(LOOKS)
    return tmp_path / "looks.py"


def test_it_sees_what_a_started_one_sees(script):
    changes = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    seen = []
    for is_forked in (True, False):
        with forked_processes(is_forked):
            done = subprocess.run(
                [sys.executable, str(script), "a", "b c"],
                input="text",
                capture_output=True,
                text=True,
                cwd=script.parent,
                env={**os.environ, **changes},
                start_new_session=True,
            )
        assert (done.returncode, done.stderr) == (3, "to standard error\n")
        seen.append(json.loads(done.stdout))
    assert seen[0] == seen[1]
    assert seen[0]["parent"] == os.getpid() and seen[0]["leads"]


SETS = "import builtins; builtins.is_set = True"
IS_SET = "import builtins; print(hasattr(builtins, 'is_set'))"


def test_what_one_tests_processes_start_with_others_do_not(tmp_path, monkeypatch):
    """Nor does the fork server, though that test be the first to need it."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "sitecustomize.py").write_text(SETS)
    (tmp_path / "is_set.py").write_text(IS_SET)
    for name, value in (
        ("_servers", {}), ("RUN", ("torch",)), ("LIBRARIES", ()), ("_HIDES", False),
    ):  # fmt: skip
        monkeypatch.setattr(forked_processes_module, name, value)
    printed = []
    for path in (tmp_path / "one", "nowhere"):
        monkeypatch.setenv("PYTHONPATH", f"{path}{os.pathsep}{os.getcwd()}")
        with forked_processes():
            command = [sys.executable, str(tmp_path / "is_set.py")]
            printed.append(subprocess.check_output(command, text=True).strip())
    assert printed == ["True", "False"]


WORKS = """
import sys
from onpolicy.cluster.ray_session import session
from onpolicy.config.groups import ClusterConfig

class Actor:
    def look(self):
        return "torch" in sys.modules, open("/proc/self/cmdline").read().rstrip("\\0")

if __name__ == "__main__":
    with session(ClusterConfig()):
        import ray
        print(ray.get(ray.remote(Actor).options(num_cpus=0).remote().look.remote()))
"""


def test_a_worker_of_rays_has_imported_what_it_was_forked_from_and_shows_what_it_does(tmp_path):
    (tmp_path / "works.py").write_text(WORKS)
    for is_forked in (True, False):
        with forked_processes(is_forked):
            done = subprocess.run(
                [sys.executable, str(tmp_path / "works.py")], stdout=subprocess.PIPE, text=True
            )
        assert done.stdout == f"({is_forked}, 'ray::Actor.look')\n"


OF_SGLANG = """
import sys
from types import FunctionType, ModuleType
from tests.support import sglang_ahead

def is_sglangs(name):
    return str(name).split(".")[0] == "sglang"

def shown():
    found = {*filter(is_sglangs, sys.modules)}
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType) and not is_sglangs(module.__name__):
            for _, name, value in sglang_ahead.variables_of(module):
                if type(value) is FunctionType and is_sglangs(value.__module__):
                    found.add(name)
    return found

found = shown()
sglang_ahead.bring_back()
print(found, {"sglang.srt", "standardize_rope_params", "process_image"} <= shown())
"""


def test_nothing_shows_of_the_sglang_that_is_hidden_until_it_is_brought_back(tmp_path):
    """Neither its modules nor its functions, which it puts into other libraries'."""
    assert printed_by(OF_SGLANG, tmp_path) == "set() True\n"


IMPORTS = """
from tests.support import sglang_ahead
from sglang.srt.function_call.function_call_parser import FunctionCallParser
print(FunctionCallParser.__name__, sglang_ahead.is_hidden())
"""


def test_a_process_may_import_sglang_for_itself(tmp_path):
    """As a gateway does for the calls of tools."""
    assert printed_by(IMPORTS, tmp_path) == "FunctionCallParser True\n"


def printed_by(code, directory):
    (directory / "script.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with forked_processes():
        command = [sys.executable, str(directory / "script.py")]
        return subprocess.check_output(command, text=True, env=environment)
