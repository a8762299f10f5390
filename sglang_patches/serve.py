"""Starts one SGLang server under a contract: `python -m sglang_patches.serve --model-path ...`.

Takes SGLang's own flags. Refuses to serve when a patch is missing, and ends when its standard input
closes, so that no engine outlives the process that started it, however that process ended.
"""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
import threading
from typing import NoReturn

from onpolicy.errors import ConfigError
from sglang_patches import registry

EXIT_WITH_STDIN = "ONPOLICY_EXIT_WITH_STDIN"
"""Set by a parent that holds the other end of our standard input."""


def main(argv: list[str]) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    registry.require_active()
    _require_known_flags(argv)
    server_args = prepare_server_args(argv)
    if os.environ.get(EXIT_WITH_STDIN):
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _require_known_flags(argv: list[str]) -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    known = [flag for action in parser._actions for flag in action.option_strings]
    for flag in (arg.split("=")[0] for arg in argv if arg.startswith("--")):
        if flag not in known:
            nearest = difflib.get_close_matches(flag, known, 1)
            hint = f" Did you mean --sglang-{nearest[0][2:]}?" if nearest else ""
            raise ConfigError(f"--sglang-{flag[2:]}: SGLang has no flag {flag}.{hint}")


def _exit_with_stdin() -> NoReturn:
    while sys.stdin.buffer.read(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(10)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
