"""GPUs of the engines, counted as slime and Miles do: a number of servers and their degree."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from onpolicy.config.flags import SGLANG_ARGS, flag_values, with_flags
from onpolicy.config.ranges import require_ranges
from onpolicy.config.sglang_flags import gives_tensor_parallel_size, tensor_parallel_size
from onpolicy.errors import ConfigError

Config = TypeVar("Config")

PER_ENGINE, TOTAL = "rollout_num_gpus_per_engine", "rollout_num_gpus"


def counted_as_engines(config: Config) -> Config:
    """The configuration with `rollout_num_engines`, and SGLang's tensor-parallel degree, as the flags
    that count GPUs say. Raises ConfigError if one thing is said twice, or GPUs would be left over."""
    values = flag_values(config)
    per_engine, total = values.get(PER_ENGINE), values.get(TOTAL)
    if per_engine is not None or total is not None:
        require_ranges(config)
    if per_engine is not None:
        config = _with_degree(config, per_engine)
    if total is not None:
        config = _with_engines(config, total, values["rollout_num_engines"])
    return config


def _with_degree(config: Any, per_engine: int) -> Any:
    sglang_args = getattr(config, SGLANG_ARGS)
    if gives_tensor_parallel_size(sglang_args):
        raise ConfigError(
            f"--rollout-num-gpus-per-engine={per_engine}: --sglang-tp-size says the same. Leave one out."
        )
    changes = {SGLANG_ARGS: (*sglang_args, "--tp-size", str(per_engine))}
    return dataclasses.replace(config, **changes)


def _with_engines(config: Any, total: int, num_engines: int) -> Any:
    per_engine = tensor_parallel_size(getattr(config, SGLANG_ARGS))
    if num_engines != 1:
        raise ConfigError(
            f"--rollout-num-gpus={total}: --rollout-num-engines={num_engines} says how many servers "
            "there are, and each takes --rollout-num-gpus-per-engine GPUs. Leave one out."
        )
    if total % per_engine:
        raise ConfigError(
            f"--rollout-num-gpus={total}: must be a multiple of --rollout-num-gpus-per-engine "
            f"{per_engine}. Give {total // per_engine * per_engine or per_engine}."
        )
    return with_flags(config, {"rollout_num_engines": total // per_engine})
