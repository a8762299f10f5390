"""Check of a server's flags by SGLang: `python -m sglang_patches.check_flags --model-path M`

Flags with secrets come by standard input, as one JSON list. The check does what `serve` does up to
the start of processes, and prints one line of JSON at the end: {"refused": null}, or the reason. So
a bad flag is found in seconds, before a model is loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import NoReturn

from onpolicy.errors import ConfigError, OnPolicyError, in_one_line
from sglang_patches import registry
from sglang_patches.server_process import _require_known_flags, import_lightly


def main(argv: list[str]) -> None:
    refused = None
    try:
        _check(argv)
    except OnPolicyError as error:
        refused = str(error)
    except (Exception, SystemExit) as error:  # SGLang's own checks raise all kinds
        refused = f"SGLang does not take this ({in_one_line(error)})."
    print("\n" + json.dumps({"refused": refused}), flush=True)


def _check(argv: list[str]) -> None:
    import_lightly()
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    registry.require_active()
    argv = [*argv, *json.load(sys.stdin)]
    _require_known_flags(argv)
    argparse.ArgumentParser.error = _refuse  # type: ignore
    server_args = prepare_server_args(argv)
    server_args.resolve_once()
    server_args.check_server_args()


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise ConfigError(f"{message.replace('argument --', '--sglang-')}. See `sglang serve --help`.")


if __name__ == "__main__":
    main(sys.argv[1:])
