"""Ray's workers, forked from what the process that starts their raylet was forked from.

A raylet starts a worker by a command line that it is given. In it a command of ours takes the place of
Python; the worker says who it is when it comes to the raylet, which does not mind whose child it is.
"""

import json
import os
import sys
from pathlib import Path

from tests.support.forked_commands import offer

DIRECTORY, WORKER = "--session_dir=", f"--python_worker_command={sys.executable} "
SETUP, ENVIRONMENT = "setup_worker.py", "--serialized-runtime-env-context="


def is_raylet(command):
    return not isinstance(command, (str, bytes)) and os.path.basename(command[0]) == "raylet"


def with_forked_workers(raylet):
    """The command line of a raylet, which then forks its workers from the one of this process."""
    (directory,) = (a.removeprefix(DIRECTORY) for a in raylet if a.startswith(DIRECTORY))
    python = Path(directory, f"python{os.getpid()}")
    offer(python, [], _without_setup)
    forked = f"--python_worker_command={python} "
    return [argument.replace(WORKER, forked) for argument in raylet]


def _without_setup(program, environment):
    """Give a worker its own variables, as a process of Ray does that then becomes a new Python."""
    if not program[0].endswith(SETUP):
        return program, environment
    (context,) = (a.removeprefix(ENVIRONMENT) for a in program if a.startswith(ENVIRONMENT))
    worker = [a for a in program[1:] if not a.startswith((ENVIRONMENT, "--language="))]
    return worker, environment | json.loads(context)["env_vars"]
