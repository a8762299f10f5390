"""Worker process: a guard, and behind it the process that runs the user's functions.

Started as `python -m onpolicy.agents.worker_process SOCKET LIMIT`; it ends, with all its children,
when its standard input closes, however the run ends.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from onpolicy.system import guard


def _serve(socket: int, hang_limit: float, directory: Path) -> None:
    from onpolicy.agents.agent_worker import serve

    serve(socket, hang_limit)


if __name__ == "__main__":
    sys.exit(guard.run(partial(_serve, int(sys.argv[1]), float(sys.argv[2]))))
