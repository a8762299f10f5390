"""The best checkpoint by an evaluation, and the link to it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from onpolicy.config.groups import OutputConfig
from onpolicy.run.saving.checkpoint import Best, name_of
from onpolicy.system import files

logger = logging.getLogger(__name__)

LINK = "best"
"""The name of the link to the best checkpoint, beside the checkpoints."""


def better(
    output: OutputConfig, best: Best | None, rollouts_done: int, metrics: Mapping[str, float]
) -> Best | None:
    """Return the best evaluation, given the `metrics` after `rollouts_done` rollouts; weights that were
    not saved are never the best.

    A new best is logged, and the link is moved to it atomically.
    """
    metric, saved = output.save_best_metric, Path(output.save) / name_of(rollouts_done)
    if not metric or not saved.is_dir():
        return best
    if (value := metrics.get(metric)) is None:
        if any(name.rpartition("/")[0] == metric.rpartition("/")[0] for name in metrics):
            logger.warning("--save-best-metric=%s: step %d has none", metric, rollouts_done)
        return best
    sign = 1 if output.save_best_mode == "max" else -1
    if best is not None and sign * value <= sign * best.value:
        return best
    link, new = saved.with_name(LINK), saved.with_name(f".partial_{LINK}")
    new.unlink(missing_ok=True)
    new.symlink_to(saved.name)
    new.replace(link)
    files.sync(link.parent)
    logger.info("%s %.4g is the best so far: %s", metric, value, saved)
    return Best(rollouts_done=rollouts_done, value=value)
