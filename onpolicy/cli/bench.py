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

    from onpolicy.run.bench.decode import bench_decode
    from onpolicy.run.bench.input_checks import check_inputs
    from onpolicy.run.bench.loop import bench_loop
    from onpolicy.run.bench.rollout import bench_rollout
    from onpolicy.run.bench.schedules import bench_schedules
    from onpolicy.run.bench.step import bench_step

    config = check_inputs(config)
    loop = bench_loop if config.longest_response is None else bench_schedules
    benches = {
        "rollout": bench_rollout,
        "decode": bench_decode,
        "step": bench_step,
        "loop": loop,
    }
    with _quiet():
        put_out(benches[config.what](config), config.json)
    return 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Let only benchmarks say something: mismatches of the stock operators are no news here."""
    levels = {"": logging.ERROR, "onpolicy": logging.ERROR, "onpolicy.run.bench": logging.INFO}
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
