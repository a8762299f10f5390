"""Choice of an environment by the flags of a run."""

from __future__ import annotations

import functools
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onpolicy.agents.agent_workers import AgentFunction
from onpolicy.agents.program import command_of, program_function
from onpolicy.config.groups.agent_flags import AgentConfig, is_of_verifiers
from onpolicy.errors import ConfigError, visible
from onpolicy.rollout.data_files import Row
from onpolicy.system.user_functions import load_function

FLAG = "--environment"
_HERE = "onpolicy.agents.environments"

LOAD_SECONDS = 1800.0
"""Seconds for an environment to say its tasks, which it may have to download."""


def environment_function(config: AgentConfig) -> AgentFunction:
    """Return the function that rolls out episodes in the environment. Raises ConfigError."""
    if is_of_verifiers(config):
        return program_function(_verifiers_command(config), repeats=True, flag=FLAG)
    kind, _, name = config.environment.partition(":")
    path, arguments = config.environment, json.loads(config.environment_args)
    if kind == "openenv-tools":
        path, arguments = f"{_HERE}.openenv_tools.roll_out", {"url": name, **arguments}
        load_function(path, FLAG)
        return AgentFunction(path=path, flag=FLAG, arguments=arguments)
    if kind == "openenv":
        path, arguments = f"{_HERE}.stepped.OpenEnv", {"url": name, **arguments}
    elif ".py:" not in path:
        path = path.replace(":", ".")
    load_function(path, FLAG)
    stepped = {
        "environment": path, "arguments": arguments, "rewards": config.environment_rewards
    }  # fmt: skip
    return AgentFunction(path=f"{_HERE}.stepped.roll_out", flag=FLAG, arguments=stepped)


def environment_rows(config: AgentConfig) -> Iterator[Row]:
    """Yield the tasks of a verifiers environment, as rows of a prompt file. Raises ConfigError."""
    rows = _rows(config.environment, *_verifiers_command(config))
    for number, row in enumerate(rows, 1):
        yield f"{FLAG}={config.environment}: row {number}", row


def _verifiers_command(config: AgentConfig) -> list[str]:
    python = config.environment_python or sys.executable
    (python,) = command_of(shlex.quote(python), "--environment-python")
    program = str(Path(__file__).with_name("verifiers_program.py"))
    return [python, "-P", program, config.environment.partition(":")[2], config.environment_args]


@functools.cache
def _rows(environment: str, *command: str) -> list[dict[str, Any]]:
    try:
        done = subprocess.run(
            [*command, "rows"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LOAD_SECONDS,
        )
        if not done.returncode:
            return [json.loads(line) for line in done.stdout.splitlines()]
        error = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired, ValueError) as failed:
        error = str(failed)
    raise ConfigError(
        f"{FLAG}={environment}: cannot be loaded by {command[0]} with --environment-args={command[-1]}: "
        f"{visible(error)[:500]}. Install verifiers 0.4 or newer and the environment there, or name a "
        "Python that has them in --environment-python, and give the arguments that it takes."
    )
