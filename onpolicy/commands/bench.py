"""`onpolicy bench rollout | step`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from onpolicy.commands.output import write_output
from onpolicy.config import parse
from onpolicy.config.tools import BenchConfig


def main(argv: Sequence[str]) -> int:
    """Measure, and print or write the JSON."""
    config = parse(BenchConfig, argv, "onpolicy bench")

    from onpolicy.bench import bench_rollout, bench_step, check_layouts
    from onpolicy.train import distributed

    logging.disable(logging.WARNING)  # mismatches of the stock operators are no news here
    check_layouts(config)
    distributed.init_process_group()
    result = bench_rollout(config) if config.what == "rollout" else bench_step(config)
    text = json.dumps(result, indent=2)
    print(text)
    if config.json:
        write_output("--json", config.json, text + "\n")
    return 0
