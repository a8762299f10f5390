"""`onpolicy train | verify | explain | bench | serve | report`. Parses first, then imports torch."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence

from onpolicy.compat.process import prepare_process
from onpolicy.errors import ConfigError, OnPolicyError
from onpolicy.system.garbage import collect_rarely
from onpolicy.system.ranks import is_first_on_host

COMMANDS = {
    "train": "reinforcement learning with rollout and training engines that agree bit for bit",
    "verify": "measure whether the two engines give a checkpoint's tokens the same log-probabilities",
    "explain": "name the operator and the layer that make the two engines differ",
    "bench": "aligned and stock operators side by side: `bench rollout`, `bench step`",
    "serve": "start one SGLang server under a contract, for runs with --rollout-server-url",
    "report": "one HTML page with the curves of several runs over each other",
}

PATIENCE = 10.0
"""Seconds that the first rank of a host has for saying what is wrong with the inputs."""


def main(argv: Sequence[str] | None = None) -> int:
    """The `onpolicy` command. Returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        print(f"onpolicy: unknown command {arguments[0]!r}.\n\n{_usage()}", file=sys.stderr)
        return 2
    prepare_process()
    collect_rarely()
    command = importlib.import_module(f"onpolicy.cli.{arguments[0]}")
    try:
        exit_code: int = command.main(arguments[1:])
        return exit_code
    except ConfigError as error:
        if is_first_on_host():
            print(f"\nConfigError: {error}", file=sys.stderr)
        else:  # torchrun ends all ranks with the first that ends: that must be the one that says it
            time.sleep(PATIENCE)
        return 2
    except OnPolicyError as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _usage() -> str:
    lines = [f"  {name:<8}{help_line}" for name, help_line in COMMANDS.items()]
    return (
        "usage: onpolicy COMMAND [flags]\n\n"
        + "\n".join(lines)
        + "\n\nFlags: onpolicy COMMAND --help"
    )
