"""`onpolicy bench rollout | decode | step | loop`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from onpolicy.cli.parse import parse
from onpolicy.cli.result import put_out, require_places
from onpolicy.config import sglang_flags
from onpolicy.config.ranges import require_ranges
from onpolicy.config.tools import BenchConfig
from onpolicy.config.unread import refuse_unread
from onpolicy.config.validate import require_cluster
from onpolicy.outputs.console import configure_logging

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Measure, and print or write the JSON."""
    config = parse(BenchConfig, argv, "onpolicy bench")
    _validate(config)

    configure_logging()
    logger.info("loading PyTorch and transformers")

    from benchmarks.bench.decode import bench_decode
    from benchmarks.bench.input_checks import check_inputs
    from benchmarks.bench.loop import bench_loop
    from benchmarks.bench.rollout import bench_rollout
    from benchmarks.bench.schedules import bench_schedules
    from benchmarks.bench.step import bench_step

    config = check_inputs(config)
    benches = {
        "rollout": bench_rollout,
        "decode": bench_decode,
        "step": bench_step,
        "loop": bench_loop if config.longest_response is None else bench_schedules,
    }
    with _quiet():
        put_out(benches[config.what](config), config.json)
    return 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Let only benchmarks say something: mismatches of the stock operators are no news here."""
    levels = {"": logging.ERROR, "onpolicy": logging.ERROR, "benchmarks": logging.INFO}
    before = {name: logging.getLogger(name).level for name in levels}
    try:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _validate(config: BenchConfig) -> None:
    """Raise ConfigError for the first value that breaks a rule."""
    require_ranges(config)
    require_cluster(config.cluster)
    refuse_unread(config)
    sglang_flags.validate(config.sglang_args, "aligned operators")
    require_places(config.run_dir, config.json)
