"""Where functions of the user's own are looked for. Each case runs in a Python of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

LOAD = """
import sys
from onpolicy.errors import ConfigError
from onpolicy.system.user_functions import load_function
try:
    print(load_function(sys.argv[1], "--flag")())
except ConfigError as error:
    print(error)
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "rewards.py").write_text("import helper\ndef f(): return helper.VALUE\n")
    (tmp_path / "helper.py").write_text("VALUE = 'from the helper'\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("f = lambda: 'from the package'\n")
    (tmp_path / "math.py").write_text("def f(): return __import__('math').sqrt(4)\n")
    (tmp_path / "broken.py").write_text("def f(: pass\n")
    (tmp_path / "raises.py").write_text("\n\nraise OSError('no GPU')\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")

    def run(path, cwd=tmp_path):
        script = tmp_path / "scripts" / "load.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(LOAD)
        done = subprocess.run(
            [sys.executable, script, path],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.mark.parametrize(
    ("path", "result"),
    [
        ("rewards.f", "from the helper"), ("./rewards.py:f", "from the helper"),
        ("package.module.f", "from the package"), ("package/module.py:f", "from the package"),
        ("math.py:f", "2.0"),
    ],
)  # fmt: skip
def test_the_current_directory_is_searched(load, path, result):
    assert load(path) == result


def test_a_file_finds_its_neighbours_from_anywhere(load, tmp_path):
    assert load(f"{tmp_path}/rewards.py:f", cwd="/") == "from the helper"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("broken.f", "--flag=broken.f: cannot be imported: SyntaxError: "),
        ("./broken.py:f", "(broken.py, line 1)"),
        ("raises.py:f", "OSError: no GPU (raises.py, line 3)"),
        ("exits.f", "SystemExit: 3 (exits.py, line 1)"),
        ("none.py:f", "No such file or directory"),
        ("rewards.py:g", "rewards.py has no 'g'"),
        ("rewards.py", "names no function"),
        ("rewards:f", "names no function"),
        ("", "names no function"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(load, path, message):
    printed = load(path)
    assert message in printed and "\n" not in printed
    assert "path/to/file.py:function" in printed
