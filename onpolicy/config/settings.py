"""The effect of settings: whether they decide results, or only places and execution."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onpolicy.config import rules
from onpolicy.config.flags import flags_of, spelled
from onpolicy.config.rules import decides_results
from onpolicy.config.sft_flags import AnyRun, SftConfig
from onpolicy.config.train_flags import TrainConfig
from onpolicy.system.hub import pinned

_FLAGS = [flag for command in (TrainConfig, SftConfig) for flag in flags_of(command)]

DECIDE_NO_RESULT = frozenset(flag.name for flag in _FLAGS if not decides_results(flag))
"""Settings that change no bit of an aligned run, and nothing but chance in another."""

BY_CONTENT = frozenset(flag.name for flag in _FLAGS if rules.BY_CONTENT in flag.notes)
"""Paths whose contents are compared instead (`digest_prompts`, `digest_sets`)."""

_GONE: dict[str, Any] = {
    "adam_beta1": 0.9, "adam_eps": 1e-08, "align": (), "clip_cov_ratio": 0.0,
    "critic_lr_warmup_iters": 0, "curriculum_floor": 0.05, "curriculum_window": 1,
    "dc_average": "trajectory", "dc_lambda_max": 1.0, "dc_lambda_min": 0.0, "entropy_ctrl": "fixed",
    "eval_top_k": "", "eval_top_p": "", "force_on_policy_ratio": False, "gdpo_reward_keys": [],
    "gdpo_reward_weights": [], "governor_calm": 0.5, "governor_ess": 0.95,
    "governor_log_ppl_abs_diff": 0.01, "governor_lr_scale": 0.5, "importance_sampling_level": "",
    "kl_cov_ratio": 0.0, "kl_ctrl": "fixed", "kl_penalty": "k1", "length_decay_baseline_window": 40,
    "length_decay_burn_in": 10, "length_decay_confirmation_steps": 5, "length_decay_factor": 2.0,
    "length_decay_floor": 0.1, "length_decay_level_ratio": 1.1, "length_decay_max_rise_steps": 20,
    "length_decay_max_truncated_ratio": 0.8, "length_decay_onset_multiplier": 1.8,
    "length_decay_onset_ratio": 1.25, "length_decay_rise_ratio": 2.0, "length_decay_slow_rise_steps": 45,
    "log_ratio_coef": 0.0, "lora_dora": False, "megatron_distributed_optimizer": True,
    "megatron_moe_dispatcher": "alltoall", "normalize_advantages": True, "overlong_penalty_factor": 1.0,
    "positive_nll_coef": 0.0, "rank_invariant": False, "rejected_in_kl": False, "rollout_kv_format": "",
    "rollout_segment_tokens": 0, "rollout_stop_at_turn_ends": True,
    "rs_veto_by": "ratio", "sapo_tau_neg": 1.05, "sapo_tau_pos": 1.0, "tis_log_ratio_clamp": 20.0,
    "tool_key": "tools", "top_entropy_quantile": 1.0, "use_opsm": False, "use_unbiased_kl": False,
    "value_clip": 0.2, "vespo_k_neg": 3.0, "vespo_k_pos": 2.0, "vespo_lambda_neg": 2.0,
    "vespo_lambda_pos": 3.0,
}  # fmt: skip
"""Settings of earlier versions that decided results, with what today's version does."""

_LENGTHS = {"num_rollout", "num_epoch", "max_steps"}
"""Settings that say when a run ends."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting with its value in a checkpoint and its present value."""

    name: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        return f"{spelled(self.name)}={_text(self.now)}, was {_text(self.recorded)}"


def changes(recorded: Mapping[str, Any], config: AnyRun) -> list[Change]:
    """Return the settings that decide results and differ from an earlier `to_dict`, except
    BY_CONTENT. A flag that the record lacks was added later and counts as its default."""
    was, now = type(config)().to_dict() | dict(recorded), config.to_dict()
    gone = [
        Change(name=name, recorded=was[name], now="removed")
        for name, today in _GONE.items()
        if was.get(name) not in (None, "", []) and not _is_same(was[name], today)
    ]
    return gone + [
        Change(name=name, recorded=was[name], now=value)
        for name, value in now.items()
        if name not in DECIDE_NO_RESULT | BY_CONTENT
        and not _is_same(was[name], value)
        and not (name in _LENGTHS and _only_goes_on(name, was, now))
    ]


def same_run(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two `to_dict`s may belong to one run, which may have been extended meanwhile."""
    deciding = (a.keys() & b.keys()) - DECIDE_NO_RESULT - _LENGTHS
    return all(_is_same(a[name], b[name]) for name in deciding)


def _only_goes_on(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a changed length only extends the run. It does not if the learning rate depends
    on the length, or if samples beyond the old end, which --rollout-lag draws ahead, are missing."""
    longer: bool = now[name] > was[name] and now["lr_decay_style"] == "constant"
    return longer and not now.get("rollout_lag")


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two values are equal; a single text equals a list of it."""
    if isinstance(a, (list, tuple)) or isinstance(b, (list, tuple)):
        a, b = ([x] if isinstance(x, str) else x for x in (a, b))
    return _text(a) == _text(b)


def _text(value: Any) -> str:
    """Return a value as in the record: a list for a tuple, and NaN equal to itself. A checkpoint of
    the hub is its name and commit, in whatever cache."""
    return json.dumps(pinned(value))
