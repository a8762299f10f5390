"""An agent that runs Python before it answers, in the form of ReTool (arXiv 2504.11536).

It writes a block of ```python, reads what the program prints, and ends with a \\boxed answer, which
math-verify compares with the label. Programs run in bubblewrap's sandbox (`bwrap`, docs/agents.md).
"""

from __future__ import annotations

import asyncio
import re

from onpolicy.agents.tools.python import PythonTool
from onpolicy.rewards.math import score

TOOL = PythonTool(time_limit=10.0)
MOST_PROGRAMS = 8


class Code:
    """An episode."""

    stop = ("\n```\n",)

    def reset(self, prompt):
        self._label, self._num_programs = prompt.label, 0

    async def step(self, action):
        programs = re.findall(r"```python\n(.*?)\n```\n\Z", action, re.DOTALL)
        if not programs or self._num_programs == MOST_PROGRAMS:
            return "", await asyncio.to_thread(score, action, self._label), True
        self._num_programs += 1
        found = await TOOL.run(programs[-1])
        return f"```output\n{found.text}\n```\n", 0.0, False
