"""`onpolicy bench` finds what it runs, wherever it is called."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[3] / "benchmarks/bench"


def test_what_the_command_runs_is_installed_with_it(tmp_path):
    code = "import benchmarks.bench.turns as turns; print(turns.__file__)"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == str(BENCH / "turns.py"), done.stderr
