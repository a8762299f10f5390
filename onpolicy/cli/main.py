"""The command `onpolicy`, which parses arguments before anything imports torch."""

import importlib
import signal
import sys
from collections.abc import Sequence

from onpolicy.cli.gone_flags import GONE
from onpolicy.compat.process import collect_rarely, prepare_process
from onpolicy.errors import HOW_TO_INSTALL, ConfigError, OnPolicyError, visible
from onpolicy.system import ending

COMMANDS = {
    "train": "reinforcement learning with rollout and training engines that agree bit for bit",
    "data": "a first look at prompts: rows, fields, lengths, what a run would refuse",
    "sft": "supervised fine-tuning: learn given answers, by the trainer of `train`",
    "eval": "evaluate a checkpoint alone, to the numbers that its run would have recorded",
    "verify": "measure whether the two engines give a checkpoint's tokens the same log-probabilities",
    "explain": "name the operator and the layer that make the two engines differ",
    "bench": "aligned and stock operators side by side: rollout, decode, step, loop, agents",
    "serve": "start one SGLang server under a contract, for runs with --rollout-server-url",
    "export": "write a checkpoint that an adapter was merged into",
    "report": "one HTML page with the curves of several runs over each other",
    "episodes": "one HTML page with the episodes of a run: turns, tool calls, tokens and branches",
}

OF_EXTRAS = ("accelerate", "sglang", "torch", "transformers")
"""Packages that `pip install onpolicy` brings with an extra alone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `onpolicy` command, and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and {"-h", "--help"} & {*arguments}:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` may close the pipe early
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        if instead := GONE.get(arguments[0], ""):
            instead = f" It was removed. {instead}"
        print(
            f"onpolicy: unknown command {arguments[0]!r}.{instead}\n\n{_usage()}", file=sys.stderr
        )
        return 2
    prepare_process()
    collect_rarely()
    command = importlib.import_module(f"onpolicy.cli.{arguments[0]}")
    try:
        with ending.heard():
            exit_code: int = command.main(arguments[1:])
        return exit_code
    except ending.Ended as ended:
        assert isinstance(ended.code, int)
        return ended.code
    except OnPolicyError as error:
        print(f"\n{type(error).__name__}: {visible(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except ModuleNotFoundError as error:
        if error.name not in OF_EXTRAS:
            raise
        print(
            f"\nonpolicy {arguments[0]}: {error.name} is not installed. {HOW_TO_INSTALL}",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _usage() -> str:
    lines = [f"  {name:<9}{help_line}" for name, help_line in COMMANDS.items()]
    return (
        "usage: onpolicy COMMAND [flags]\n\n"
        + "\n".join(lines)
        + "\n\nFlags: onpolicy COMMAND --help"
    )
