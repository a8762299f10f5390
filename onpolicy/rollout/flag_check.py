"""What SGLang itself says of the user's --sglang-* flags, before any server is started.

SGLang takes seconds to import, so it does that in a process of its own while other inputs are read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Self

from onpolicy.config.sglang_flags import PREFIX
from onpolicy.errors import ConfigError
from onpolicy.rollout.engine_args import EngineSpec, engine_environment, engine_flags

ANY_PORT = 30000
"""Stands for the server's port, which the check does not open."""


class FlagCheck:
    """A check under way; as a context manager it leaves no process behind."""

    def __init__(self, spec: EngineSpec):
        self._given = spec.sglang_args
        self._process: subprocess.Popen[str] | None = None
        if spec.sglang_args:  # the flags that onpolicy itself chooses are known to be good
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang_patches.check_flags", *engine_flags(spec, ANY_PORT)],
                env={**os.environ, **engine_environment(spec)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def require_passed(self) -> None:
        """Wait for the answer. Raises ConfigError with SGLang's own words if it is no."""
        if self._process is None:
            return
        output, log = self._process.communicate()
        lines = (output or log).strip().splitlines() or [""]
        refused = json.loads(lines[-1])["refused"] if lines[-1].startswith("{") else lines[-1]
        if not refused:
            return
        given = " ".join(arg.replace("--", PREFIX, 1) for arg in self._given)
        reason = refused if refused.startswith(PREFIX) else f"{given}: {refused}"
        raise ConfigError(f"{reason} Correct the flag, or leave it out.")
