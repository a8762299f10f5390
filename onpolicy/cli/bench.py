"""`onpolicy bench rollout | step`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from onpolicy.cli.parse import parse
from onpolicy.config import sglang_flags
from onpolicy.config.ranges import require_ranges
from onpolicy.config.tools import BenchConfig
from onpolicy.config.unread import refuse_unread
from onpolicy.outputs.places import require_directory, require_writable, write_output
from onpolicy.system.ranks import is_first_rank


def main(argv: Sequence[str]) -> int:
    """Measure, and print or write the JSON."""
    config = parse(BenchConfig, argv, "onpolicy bench")
    require_ranges(config)
    refuse_unread(config)
    sglang_flags.validate(config.sglang_args, aligned=True)
    require_directory("--run-dir", config.run_dir)
    if config.json:
        require_writable("--json", config.json)

    from onpolicy.run.bench import bench_rollout, bench_step, check_inputs
    from onpolicy.train import distributed

    if is_first_rank():
        check_inputs(config)
    logging.disable(logging.WARNING)  # mismatches of the stock operators are no news here
    distributed.init_process_group()
    result = bench_rollout(config) if config.what == "rollout" else bench_step(config)
    text = json.dumps(result, indent=2)
    print(text)
    if config.json:
        write_output("--json", config.json, text + "\n")
    return 0
