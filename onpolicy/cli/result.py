"""What `onpolicy verify` and `onpolicy bench` end with: JSON on standard output, and in --json."""

from __future__ import annotations

import json
from typing import Any

from onpolicy.outputs.destinations import require_directory, require_writable, write_output


def require_places(run_dir: str, json_file: str) -> None:
    """Raise ConfigError if the logs or the result could not be written."""
    require_directory("--run-dir", run_dir)
    if json_file:
        require_writable("--json", json_file)


def put_out(result: dict[str, Any], json_file: str) -> None:
    """Print the result, and write it into the file if one is given."""
    text = json.dumps(result, indent=2)
    print(text)
    if json_file:
        write_output("--json", json_file, text + "\n")
