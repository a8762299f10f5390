"""`onpolicy bench rollout | step | loop`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from onpolicy.cli.parse import parse
from onpolicy.cli.result import put_out, require_places
from onpolicy.config import sglang_flags
from onpolicy.config.ranges import require_ranges
from onpolicy.config.tools import BenchConfig
from onpolicy.config.unread import refuse_unread
from onpolicy.config.validate import require_cluster


def main(argv: Sequence[str]) -> int:
    """Measure, and print or write the JSON."""
    config = parse(BenchConfig, argv, "onpolicy bench")
    _validate(config)

    from onpolicy.run.bench.input_checks import check_inputs
    from onpolicy.run.bench.loop import bench_loop
    from onpolicy.run.bench.rollout import bench_rollout
    from onpolicy.run.bench.schedules import bench_schedules
    from onpolicy.run.bench.step import bench_step

    check_inputs(config)
    logging.disable(logging.WARNING)  # mismatches of the stock operators are no news here
    try:
        loop = bench_loop if config.longest_response is None else bench_schedules
        bench = {"rollout": bench_rollout, "step": bench_step, "loop": loop}[config.what]
        put_out(bench(config), config.json)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _validate(config: BenchConfig) -> None:
    """Raise ConfigError for the first value that breaks a rule."""
    require_ranges(config)
    require_cluster(config.cluster)
    refuse_unread(config)
    sglang_flags.validate(config.sglang_args, "aligned operators")
    require_places(config.run_dir, config.json)
