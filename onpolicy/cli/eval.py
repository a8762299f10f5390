"""The command `onpolicy eval CHECKPOINT`."""

import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onpolicy.cli.command import begin_with, put_out
from onpolicy.cli.parse import as_argument, parse
from onpolicy.config import TrainConfig
from onpolicy.config.flags import (
    SGLANG_ARGS,
    Flag,
    flag_defaults,
    flag_types,
    flags_of,
    spelled,
    with_flags,
)
from onpolicy.config.rules import decides_results, require_ranges, require_sense
from onpolicy.config.secrets import HIDDEN, is_secret
from onpolicy.config.sglang_flags import PREFIX
from onpolicy.config.tool_flags import EvaluateConfig
from onpolicy.errors import ConfigError
from onpolicy.system.hub import model_path

logger = logging.getLogger(__name__)

PROG = "onpolicy eval"

OF_THE_COMMAND = {"checkpoint", "trust_remote_code", "log_samples", "json", "run_dir"}
"""The flags that are never taken from the run that wrote a checkpoint."""


def main(argv: Sequence[str]) -> int:
    """Find the checkpoint and the flags of its run, check everything, then evaluate."""
    given = parse(EvaluateConfig, argv, PROG)
    if not given.checkpoint:
        raise ConfigError("CHECKPOINT is missing. Give a Hugging Face checkpoint, or one of a run.")

    from onpolicy.run.saving.checkpoint import find_published

    found = find_published(model_path(given.checkpoint, "CHECKPOINT"))
    taken = [*_of_the_run(found.config, given)]
    config = parse(EvaluateConfig, [*taken, *argv], PROG)
    require_ranges(config)
    train_config = config.train_config(str(found.hf_checkpoint))
    require_sense(train_config)
    begin_with(config)
    if taken:
        logger.info("as in the run that wrote the checkpoint: %s", shlex.join(taken))

    from onpolicy.rewards.scorer import Scorer
    from onpolicy.run.commands.evaluate import evaluate
    from onpolicy.run.launch.input_checks import fit_run
    from onpolicy.run.launch.inputs import read_inputs

    train_config = fit_run(train_config)
    inputs = read_inputs(train_config, Scorer(train_config.reward))
    result = evaluate(train_config, inputs, found.rollouts_done)
    put_out({"checkpoint": config.checkpoint, **result}, config.json)
    return 0


def _of_the_run(recorded: Mapping[str, Any], given: EvaluateConfig) -> Iterator[str]:
    """Yield a run's flags that decide an evaluation, as arguments to put before the user's. The
    user's own reward, agent or evaluation sets replace the run's, with all flags of their group.
    Raises ConfigError for an API key that the run had, since no record holds it."""
    if not given.sglang_args:
        for argument in recorded.get(SGLANG_ARGS, ()):
            if not is_secret(argument):
                yield argument.replace("--", PREFIX, 1) if argument.startswith("--") else argument
    flags, defaults = flags_of(EvaluateConfig), flag_defaults(EvaluateConfig)
    own = [flag for flag in flags if flag.value(given) != defaults[flag.name]]
    values = {**recorded, "row_parallel_blocks": _blocks(recorded)}
    for flag in flags:
        value = values.get(flag.name)
        if value in (None, [], defaults[flag.name]) or not _is_taken(flag, own):
            continue
        if value == HIDDEN and flag not in own:
            missing = f"{spelled(flag.name)} is missing"
            raise ConfigError(f"{missing}: the run had one, and no record holds it.")
        yield from as_argument(flag.name, value)
    if recorded:  # last, so that the list of a flag above ends before the user's arguments
        yield from as_argument("seed", recorded["seed"])


def _is_taken(flag: Flag, own: Sequence[Flag]) -> bool:
    group, groups = flag.path[0], {each.path[0] for each in own}
    if flag.name in OF_THE_COMMAND or (group in ("reward", "agent") and group in groups):
        return False
    if flag.name in ("eval_prompt_data", "eval_config") and {each.name for each in own} & {
        "eval_prompt_data", "eval_config"
    }:  # fmt: skip
        return False
    return group != "engines" or decides_results(flag)


def _blocks(recorded: Mapping[str, Any]) -> int | None:
    """Return the row-parallel blocks of the run, if it kept the order of sums over ranks; else None."""
    known = flag_types(TrainConfig)
    single = {k: x for k, x in recorded.items() if k in known and not isinstance(x, list)}
    run = with_flags(TrainConfig(), single)
    plan = replace(run, sglang_args=tuple(recorded.get(SGLANG_ARGS, ()))).plan
    blocks = plan.row_parallel_blocks
    return blocks if plan.starts_aligned and blocks > 1 else None
