"""Check of the user's --sglang-* flags by SGLang itself, before any server is started.

SGLang takes seconds to import, so it does that in a process of its own while other inputs are read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Self

from onpolicy.config.secrets import hide
from onpolicy.config.sglang_flags import PREFIX
from onpolicy.errors import ConfigError, EngineError
from onpolicy.rollout.engine_args import (
    EngineSpec,
    engine_environment,
    engine_flags,
    secret_flags,
)

ANSWER = '{"refused":'
"""The beginning of the line that `sglang_patches.check_flags` answers with, among SGLang's own."""

ANY_PORT = 30000
"""A placeholder for the server's port, which the check does not open."""


class FlagCheck:
    """A check under way; as a context manager it leaves no process behind."""

    def __init__(self, spec: EngineSpec):
        self._spec = spec
        self._process: subprocess.Popen[str] | None = None
        if spec.sglang_args:  # the flags that onpolicy itself chooses are known to be good
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang_patches.check_flags", *engine_flags(spec, ANY_PORT)],
                env={**os.environ, **engine_environment(spec)},
                stdin=subprocess.PIPE,
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
        """Wait for the answer. Raises ConfigError with SGLang's own words if it is no.

        Raises EngineError if there is none.
        """
        if self._process is None:
            return
        output, log = self._process.communicate(json.dumps(secret_flags(self._spec)))
        answers = [line for line in output.splitlines() if line.startswith(ANSWER)]
        if not answers:
            tail = "\n".join(log.splitlines()[-12:])
            raise EngineError(
                f"SGLang could not be asked about its flags. The end of its log:\n{tail}"
            )
        refused = json.loads(answers[-1])["refused"]
        if refused is None:
            return
        given = " ".join(arg.replace("--", PREFIX, 1) for arg in hide(self._spec.sglang_args))
        reason = refused if refused.startswith(PREFIX) else f"{given}: {refused}"
        raise ConfigError(f"{reason} Correct the flag, or leave it out.")
