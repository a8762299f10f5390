"""Flags that a configuration sets and nothing would read: refused, since whoever set them meant it.

A flag counts as set if it differs from its default. Each row below says which flags a switch is for;
the first row that names a flag decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from onpolicy.config.flags import flag_defaults, flag_values, spelled
from onpolicy.config.plan import corrections_in
from onpolicy.errors import ConfigError

Values = Mapping[str, Any]


class Reader(NamedTuple):
    """What reads some flags."""

    flags: str
    """Patterns of their names, with * and ?, between spaces."""

    switch: str
    """What makes it read them, for the message."""

    reads: Callable[[Values], Any]


def _is_free(values: Values) -> bool:
    return bool(values["rollout_schedule"] == "free")


def _lags_alone(values: Values) -> bool:
    """Whether samples may lag behind and nothing else is asked for."""
    lags = values["rollout_lag"] or values["rollout_segment_tokens"] or _is_free(values)
    return bool(lags) and not (corrections_in(values) or values["use_rollout_logprobs"])


def _weighs(values: Values) -> bool:
    governed, own = values["mismatch_governor"], values["custom_tis_function_path"]
    weighs_lag = values["correct_lag"] and _lags_alone(values)  # as `Ladder` does
    return bool(values["use_tis"] or governed or own or weighs_lag)


def _rejects(values: Values) -> bool:
    governed, own = values["mismatch_governor"], values["custom_tis_function_path"]
    return bool(values["use_rs"] or governed or own)


def _corrects(values: Values) -> bool:
    return _weighs(values) or _rejects(values) or values["rs_veto_threshold"] is not None


READERS = (
    Reader("dynamic_sampling_limit", "--dynamic-sampling", lambda v: v["dynamic_sampling"]),
    Reader(
        "over_sampling_batch_size",
        "--dynamic-sampling, --rollout-segment-tokens or --rollout-schedule free",
        lambda v: v["dynamic_sampling"] or v["rollout_segment_tokens"] or _is_free(v),
    ),
    Reader("max_staleness replay", "--rollout-schedule free", _is_free),
    Reader("max_rank_restarts", "--save and --save-interval", lambda v: v["save_interval"]),
    Reader("megatron_*", "--train-backend megatron", lambda v: "megatron" in v["train_backend"]),
    Reader(
        "correct_lag",
        "--rollout-lag, --rollout-segment-tokens or --rollout-schedule free, and no other correction",
        _lags_alone,
    ),
    Reader("tis_level tis_mode tis_batch_normalize", "--use-tis", _weighs),
    Reader(
        "tis_upper_bound",
        "--use-tis, --use-rs, --dc-mode or --get-mismatch-metrics",
        lambda v: _corrects(v) or v["get_mismatch_metrics"] or v["dc_mode"],
    ),
    Reader(
        "tis_lower_bound",
        "--tis-mode clip or mask, or --use-rs",
        lambda v: _rejects(v) or (_weighs(v) and v["tis_mode"] != "truncate"),
    ),
    Reader("rs_veto_*", "--rs-veto-threshold", lambda v: v["rs_veto_threshold"] is not None),
    Reader("rs_*", "--use-rs", _rejects),
    Reader(
        "tis_nonfinite",
        "a run without --true-on-policy-mode",
        lambda v: _corrects(v) or v["dc_mode"] or not v["true_on_policy_mode"],
    ),
    Reader("rejected_in_kl", "--use-kl-loss", lambda v: v["use_kl_loss"]),
    Reader("tis_* rejected_in_*", "--use-tis or --use-rs", _corrects),
    Reader("dc_margin", "--dc-mode margin", lambda v: v["dc_mode"] == "margin"),
    Reader(
        "dc_eta dc_budget dc_lambda_min dc_lambda_max dc_average",
        "--dc-mode lagrangian",
        lambda v: v["dc_mode"] == "lagrangian",
    ),
    Reader("dc_*", "--dc-mode", lambda v: v["dc_mode"]),
    Reader("governor_*", "--mismatch-governor", lambda v: v["mismatch_governor"]),
    Reader(
        "length_decay_*",
        "--lr-schedule length-decay",
        lambda v: v["lr_schedule"] == "length-decay",
    ),
    Reader("kl_loss_* use_unbiased_kl ref_checkpoint", "--use-kl-loss", lambda v: v["use_kl_loss"]),
    Reader("opsm_delta", "--use-opsm", lambda v: v["use_opsm"]),
    Reader(
        "eps_clip_c", "--policy-loss ppo or gspo", lambda v: v["policy_loss"] in ("ppo", "gspo")
    ),
    Reader(
        "eps_clip eps_clip_high",
        "--policy-loss ppo, gspo or cispo",
        lambda v: v["policy_loss"] != "reinforce",
    ),
    Reader(
        "eval_temperature eval_max_response_len n_samples_per_eval_prompt",
        "--eval-interval",
        lambda v: v["eval_interval"],
    ),
    Reader("keep_checkpoints", "--save", lambda v: v["save"]),
    Reader("allow_changed_settings", "--load or --replay", lambda v: v["load"] or v["replay"]),
    Reader("wandb_*", "--use-wandb", lambda v: v["use_wandb"]),
    Reader(
        "rollout_host rollout_base_port rollout_start_timeout rollout_max_restarts colocate "
        "rollout_num_gpus rollout_num_gpus_per_engine",
        "a run without --rollout-server-url, which starts its servers itself,",
        lambda v: not v.get("rollout_server_url") and v.get("what") != "step",
    ),
    Reader("placement_timeout", "--ray-address", lambda v: v["ray_address"]),
    Reader("batch_sizes context_lens", "bench decode", lambda v: v["what"] == "decode"),
    Reader(
        "num_prompts", "bench rollout or loop", lambda v: v.get("what") not in ("step", "decode")
    ),
    Reader("longest_response", "bench loop", lambda v: v["what"] == "loop"),
    Reader("num_tokens profile", "bench step", lambda v: v["what"] == "step"),
    Reader(
        "train_backend", "bench step or loop", lambda v: v.get("what") not in ("rollout", "decode")
    ),
    Reader("n_samples_per_prompt", "bench loop", lambda v: v.get("what", "loop") == "loop"),
    Reader("align", "a command other than bench", lambda v: "what" not in v),
    Reader(
        "ray_address rollout_num_*",
        "bench rollout or loop",
        lambda v: v.get("what") not in ("step", "decode"),
    ),
    Reader("actor_num_*", "bench loop", lambda v: v.get("what", "loop") == "loop"),
)


def refuse_unread(config: Any) -> None:
    """Raise ConfigError for the first flag that is set and that nothing would read."""
    values, defaults = flag_values(config), flag_defaults(type(config))
    for name, default in defaults.items():
        if values[name] == default:
            continue
        reader = _reader(name)
        if reader is not None and not reader.reads(values):
            given = values[name]
            shown = " ".join(map(str, given)) if isinstance(given, tuple) else given
            raise ConfigError(
                f"{spelled(name)}={shown}: only {reader.switch} reads it, so it would do "
                "nothing here. Add what reads it, or leave the flag out."
            )


def _reader(name: str) -> Reader | None:
    for reader in READERS:
        if any(fnmatchcase(name, pattern) for pattern in reader.flags.split()):
            return reader
    return None
