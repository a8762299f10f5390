"""Start of one SGLang server under a contract: `python -m sglang_patches.server_process
--model-path ...`.

Takes SGLang's own flags, and refuses to serve when a patch is missing. A parent that sets
ONPOLICY_GUARDED writes the flags with secrets to our standard input, as one line of JSON: a command
line can be read by everyone on the host. No process outlives that parent, however it ends
(onpolicy/system/guard.py).
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

from onpolicy.compat.light_imports import import_transformers
from onpolicy.compat.process import collect_rarely, prepare_process
from onpolicy.errors import ConfigError
from onpolicy.system import guard
from sglang_patches import registry
from sglang_patches.shared_names import DIRECTORY_VARIABLE, PATTERNS

GUARDED = "ONPOLICY_GUARDED"
"""A variable of a parent that holds the other end of our standard input."""

LATER = "--later"
"""A flag in place of all others, which the parent sends later (rollout/early_server.py)."""

BEFORE_FLAGS = (
    "sglang.launch_server", "sglang_patches.plugin",
    "compressed_tensors", "fastapi", "openai.types.responses",
)  # fmt: skip
"""The first imports of `serve`, in its order, which no flag changes, and libraries that SGLang imports
later: its own later imports are patched."""

RENDEZVOUS_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang's variable. Without it rank 0 opens a store on all interfaces, even if it is alone."""


def main(argv: list[str]) -> None:
    prepare_process()
    if not os.environ.get(GUARDED):
        return serve(argv)
    if argv == [LATER]:
        sys.exit(_serve_later())
    flags = json.loads(_line())
    secrets = [flag.split("=", 1)[1] for flag in flags]

    def serve_in(directory: Path) -> None:
        _use(directory)
        serve([*argv, *flags])

    sys.exit(guard.run(serve_in, secrets=secrets, shared_memory=PATTERNS))


def _line() -> bytes:
    """Return the line that the parent writes; empty if it has ended."""
    return io.FileIO(sys.stdin.fileno(), closefd=False).readline()


def _use(directory: Path) -> None:
    os.environ["TMPDIR"] = os.environ[DIRECTORY_VARIABLE] = tempfile.tempdir = str(directory)


def _serve_later() -> int:
    """Import all that needs no flags, serve by later orders, and return the exit code."""
    told, tell = os.pipe()

    def pass_on() -> list[str]:
        """Pass the orders to the server, redirect output into its log, and return the secrets."""
        if not (line := _line()):
            return []
        orders = json.loads(line)
        log = os.open(orders["log"], os.O_WRONLY | os.O_APPEND)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log, stream.fileno())
        with os.fdopen(tell, "wb") as pipe:
            pipe.write(line)
        return [flag.split("=", 1)[1] for flag in orders["secrets"]]

    def serve_in(directory: Path) -> None:
        os.close(tell)
        _use(directory)
        import_lightly()
        for module in BEFORE_FLAGS:
            importlib.import_module(module)
        orders = json.loads(os.fdopen(told).readline())
        os.environ.update(orders["variables"])
        serve([*orders["flags"], *orders["secrets"]])

    return guard.run(serve_in, shared_memory=PATTERNS, when_told=pass_on)


def serve(argv: list[str]) -> None:
    import_lightly()
    from onpolicy.ops.refused_environment import require_ours

    require_ours(os.environ)  # another host's environment was not looked at before
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    registry.require_active()
    _require_known_flags(argv)
    _meet_in_a_file(argv)
    server_args = prepare_server_args(argv)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def import_lightly() -> None:
    """Make SGLang's import a third faster; call it before the import."""
    collect_rarely()
    # Else SGLang's dumper of tensors imports it, and wandb with it, where they are installed.
    sys.modules["megatron"] = None  # type: ignore[assignment]
    import_transformers(reads_images=True)


def _meet_in_a_file(argv: list[str]) -> None:
    """Let the ranks of a server meet through a file, without a port for everyone."""
    directory, addresses = (
        os.environ.get(DIRECTORY_VARIABLE),
        ("--dist-init-addr", "--nccl-init-addr"),
    )
    if directory and not any(arg.startswith(addresses) for arg in argv):
        os.environ.setdefault(RENDEZVOUS_VARIABLE, f"file://{directory}/rendezvous")


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


if __name__ == "__main__":
    main(sys.argv[1:])
