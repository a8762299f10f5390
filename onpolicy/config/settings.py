"""What a setting decides: results, or only where things are and how they run."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onpolicy.config.flags import spelled
from onpolicy.config.train import TrainConfig
from onpolicy.errors import ConfigError

DECIDE_NO_RESULT = frozenset({
    # where things are or go, and what is logged
    "run_dir", "save", "save_interval", "keep_checkpoints", "load", "allow_changed_settings",
    "max_rank_restarts",
    "use_tensorboard", "use_wandb", "wandb_required", "wandb_project", "wandb_group", "wandb_run_name",
    "log_samples", "log_samples_interval", "get_mismatch_metrics", "eval_interval",
    "custom_config_path", "dry_run", "trust_remote_code", "rm_workers", "rm_max_error_rate",
    "replay",
    # how the engines are run
    "cpu_threads", "rollout_num_engines", "rollout_server_url", "rollout_api_key", "rollout_host",
    "rollout_base_port", "rollout_max_concurrency", "rollout_request_timeout",
    "rollout_start_timeout", "rollout_health_timeout", "rollout_max_restarts", "weight_sync",
    "update_weight_buffer_size", "colocate", "moe_activation_checkpointing",
    # the hosts
    "ray_address", "placement_timeout", "actor_num_nodes", "actor_num_gpus_per_node",
    "actor_num_ranks_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine",
})  # fmt: skip
"""Settings that change no bit of an aligned run, and nothing but chance in another."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that a checkpoint was made under, and what it is now."""

    name: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        return f"{spelled(self.name)}={_text(self.now)}, was {_text(self.recorded)}"


def changes(recorded: Mapping[str, Any], config: TrainConfig) -> list[Change]:
    """The settings that decide results and are others than those of an earlier `to_dict`.

    A flag that the record lacks was added since, and meant its default.
    """
    was, now = type(config)().to_dict() | dict(recorded), config.to_dict()
    return [
        Change(name=name, recorded=was[name], now=value)
        for name, value in now.items()
        if name not in DECIDE_NO_RESULT
        and _text(was[name]) != _text(value)
        and not (name == "num_rollout" and _only_goes_on(was, now))
    ]


def same_run(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two `to_dict`s may be of one run, which may have been made longer on the way."""
    deciding = (a.keys() & b.keys()) - DECIDE_NO_RESULT - {"num_rollout"}
    return all(_text(a[name]) == _text(b[name]) for name in deciding)


def require_known(names: Sequence[str], config: TrainConfig) -> None:
    """Raise ConfigError for a name in --allow-changed-settings that is no setting."""
    known = config.to_dict()
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {nearest[0]}?" if nearest else "Take the names from config.json."
            raise ConfigError(f"--allow-changed-settings={name}: no setting has that name. {hint}")


def _only_goes_on(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """A longer run is the same run, unless its learning rate goes by its length, or what it would have
    drawn ahead at that end is not there."""
    longer: bool = now["num_rollout"] > was["num_rollout"] and now["lr_decay_style"] == "constant"
    return longer and not now["rollout_lag"]


def _text(value: Any) -> str:
    """As the record holds it: a list for a tuple, and NaN equal to itself."""
    return json.dumps(value)
