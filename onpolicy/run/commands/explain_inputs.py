"""What `onpolicy explain` runs on: random prompts as `verify`, or the case that a run left."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from onpolicy.config.tools import ExplainConfig
from onpolicy.errors import ConfigError
from onpolicy.outputs.trajectories import read
from onpolicy.run.cases import read_case
from onpolicy.run.saving.checkpoint import STATE, checkpoints

logger = logging.getLogger(__name__)


def with_case(config: ExplainConfig) -> ExplainConfig:
    """With the weights of --load, and with what the case was sampled under.

    Raises ConfigError if a file is none, or there is no checkpoint.
    """
    if config.load:
        path = _exported(Path(config.load), config)
        config = replace(config, model=replace(config.model, hf_checkpoint=str(path)))
    if not config.case:
        return config
    case = read_case(Path(config.case))
    contract, trajectory = case["contract"], read(case["trajectory"])
    kinds = contract["kinds"]
    is_aligned = contract["backend"] != "stock" and not kinds
    blocks = contract["row_parallel_blocks"] if is_aligned else 0
    return replace(
        config,
        operators=replace(config.operators, row_parallel_blocks=blocks, align=",".join(kinds)),
        temperature=case["params"]["temperature"],
        max_prompt_len=max(8, len(trajectory.prompt_ids)),
        max_new_tokens=trajectory.num_sampled,
        model=replace(config.model, dtype=contract["dtype"]),
        true_on_policy_mode=is_aligned,
    )


def _exported(directory: Path, config: ExplainConfig) -> Path:
    """The weights that a checkpoint of a run holds for other programs: those that were pushed."""
    if not (directory / STATE).exists():
        found = checkpoints(directory) if directory.is_dir() else {}
        if not found:
            raise ConfigError(
                f"--load={directory}: holds no checkpoint. Give the --save directory of the run, or one "
                "checkpoint in it."
            )
        directory = found[_wanted(found.keys(), config)]
    logger.info("weights of %s", directory)
    return directory / "hf"


def _wanted(numbers: object, config: ExplainConfig) -> int:
    """The checkpoint that the case was sampled with, if it was saved; else the latest."""
    available: list[int] = sorted(numbers)  # type: ignore[call-overload]
    step = read_case(Path(config.case))["step"] if config.case else available[-1]
    if step in available:
        return int(step)
    logger.warning(
        "--load=%s: has no checkpoint of rollout %d; taking the latest, %d, so the case may not come "
        "again", config.load, step, available[-1],
    )  # fmt: skip
    return available[-1]
