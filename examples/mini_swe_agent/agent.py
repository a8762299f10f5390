"""mini-swe-agent in an episode: its loop, its model class and its environment, none of them changed.

`--custom-agent-function-path agent.py:fix`. The commands that a policy writes run in a copy of the toy
repository, and as you: with a policy that knows commands, use an environment of mini-swe-agent's that
has a container.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would be fetched
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

from onpolicy.rollout.rollouter import Episode

REPOSITORY = Path(__file__).parent / "repository"
SYSTEM = "Answer with one command in ```mswea_bash_command\n...\n```."
LIMITS = {"step_limit": 4, "max_consecutive_format_errors": 4, "cost_limit": 0.0}


def fix(base_url: str, api_key: str, prompt) -> Episode:
    """Let the agent work on a copy of the repository; 1 if its test passes then."""
    with tempfile.TemporaryDirectory() as directory:
        work = shutil.copytree(REPOSITORY, Path(directory) / "repository")
        model = LitellmTextbasedModel(
            model_name="openai/policy",
            model_kwargs={"api_base": base_url, "api_key": api_key},
            cost_tracking="ignore_errors",
        )
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=str(work), timeout=10),
            system_template=SYSTEM,
            instance_template="{{task}}",
            **LIMITS,
        )
        ended = agent.run(prompt.text)
        test = subprocess.run([sys.executable, "-B", "test_mean.py"], cwd=work, capture_output=True)
        return Episode(
            reward=float(test.returncode == 0),
            info={"ended": ended["exit_status"], "num_calls": agent.n_calls},
        )
