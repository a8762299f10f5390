"""The range of every number that a flag takes, for all commands: a flag means the same in each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from onpolicy.config.flags import flag_values, spelled
from onpolicy.errors import ConfigError

Number = int | float

INT_MAX = 2**31 - 1
"""The largest value of an integer flag without a bound of its own: what fits 32 bits."""

FLOAT_MAX = 3.4e38
"""The largest magnitude of a float32, in which both engines compute."""

SMALLEST_TEMPERATURE = 1e-6
"""SGLang samples greedily below it."""

MAX_SECONDS = 1e9

_AT_LEAST: dict[str, Number] = {
    "num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 1,
    "rollout_max_response_len": 1, "rollout_max_concurrency": 1, "rollout_num_engines": 1,
    "rollout_max_restarts": 0, "rollout_base_port": 0, "cpu_threads": 0, "eps_clip": 0,
    "eps_clip_high": 0, "opsm_delta": 0, "kl_loss_coef": 0, "tis_lower_bound": 0,
    "tis_upper_bound": 0, "rs_lower_bound": 0, "rs_upper_bound": 0, "rs_veto_threshold": 0,
    "dc_lambda": 0, "dc_eta": 0, "dc_budget": 0, "dc_lambda_min": 0, "dc_lambda_max": 0,
    "dc_margin": 0, "governor_rise_after": 1, "governor_fall_after": 1, "governor_lr_scale": 0,
    "global_batch_size": 1, "max_tokens_per_gpu": 1, "lr": 0, "lr_warmup_steps": 0,
    "length_decay_period": 1, "length_decay_default_period": 0, "length_decay_burn_in": 1,
    "weight_decay": 0, "clip_grad": 0,
    "megatron_tp": 1, "megatron_pp": 1, "megatron_cp": 1, "megatron_ep": 1,
    "update_weight_buffer_size": 1, "eval_interval": 0,
    "n_samples_per_eval_prompt": 1, "eval_temperature": 0, "eval_max_response_len": 1,
    "save_interval": 0, "keep_checkpoints": 0, "log_samples": 0, "log_samples_interval": 1,
    "seed": 0, "rollout_stop_token_ids": 0, "rm_workers": 0, "rm_max_error_rate": 0,
    "rollout_top_k": -1, "rollout_top_p": 0, "rollout_min_p": 0,
    "num_prompts": 1, "prompt_len": 1, "max_new_tokens": 1, "repetitions": 1, "num_tokens": 1,
    "temperature": SMALLEST_TEMPERATURE,
}  # fmt: skip

_GREATER_THAN: dict[str, Number] = {
    "rollout_request_timeout": 0, "rollout_start_timeout": 0, "rollout_health_timeout": 0,
    "rm_time_limit": 0, "adam_eps": 0, "governor_k3": 0, "governor_log_ppl_abs_diff": 0,
    "governor_ess": 0, "governor_calm": 0, "length_decay_floor": 0, "length_decay_rise_ratio": 1,
    "tis_log_ratio_clamp": 0, "eps_clip_c": 1, "rollout_top_p": 0,
}  # fmt: skip

_AT_MOST: dict[str, Number] = {
    "seed": 2**32 - 1, "rollout_base_port": 65535, "length_decay_floor": 1, "governor_calm": 1,
    "rm_max_error_rate": 1, "rollout_top_p": 1, "rollout_min_p": 1, "rm_workers": 1024,
    "rollout_num_engines": 1024, "cpu_threads": 4096, "update_weight_buffer_size": 1 << 20,
    "rm_time_limit": MAX_SECONDS, "rollout_request_timeout": MAX_SECONDS,
    "rollout_start_timeout": MAX_SECONDS, "rollout_health_timeout": MAX_SECONDS,
}  # fmt: skip

_LESS_THAN: dict[str, Number] = {"governor_ess": 1}

_ORDERED = (
    ("tis_lower_bound", "tis_upper_bound"),
    ("rs_lower_bound", "rs_upper_bound"),
    ("dc_lambda_min", "dc_lambda_max"),
)

_MAY_BE_INFINITE = ("tis_upper_bound", "rs_upper_bound")


def require_ranges(config: Any) -> None:
    """Raise ConfigError for the first number, or text, that is beyond what its flag can take."""
    values = flag_values(config)
    for name, value in values.items():
        for item in value if isinstance(value, tuple) else (value,):
            if rule := _broken_rule(name, item):
                shown = "..." if name == "rollout_api_key" else _short(item)
                raise ConfigError(f"{spelled(name)}={shown}: {rule}")
    for lower, upper in _ORDERED:
        low, high = values.get(lower), values.get(upper)
        if low is not None and high is not None and low > high:
            raise ConfigError(
                f"{spelled(lower)}={low}: must not exceed {spelled(upper)} {high}. Change one of them."
            )


def _broken_rule(name: str, value: object) -> str | None:
    if isinstance(value, str):
        return _broken_text_rule(name, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return next(_broken_number_rules(name, value), None)


def _broken_text_rule(name: str, value: str) -> str | None:
    if "\0" in value:
        return "holds a NUL character. Leave it out."
    if name == "rollout_api_key" and not (value.isascii() and value.isprintable()):
        return "goes into an HTTP header. Use printable ASCII characters."
    if name == "run_dir" and not value.strip():
        return "is empty. Give a directory, or leave the flag out."
    return None


def _broken_number_rules(name: str, value: Number) -> Iterator[str]:
    # Compared so that NaN, which is neither smaller nor larger, breaks a rule.
    if name in _AT_LEAST and not value >= _AT_LEAST[name]:
        yield f"must be at least {_AT_LEAST[name]:g}. Give a larger value."
    if name in ("adam_beta1", "adam_beta2") and not 0 <= value < 1:
        yield "must be in [0, 1). Give a value in that range."
    if name in _GREATER_THAN and not value > _GREATER_THAN[name]:
        yield f"must be greater than {_GREATER_THAN[name]:g}. Give a larger value."
    if name in _AT_MOST and not value <= _AT_MOST[name]:
        yield f"must be at most {_AT_MOST[name]:.10g}. Give a smaller value."
    if name in _LESS_THAN and not value < _LESS_THAN[name]:
        yield f"must be less than {_LESS_THAN[name]:g}. Give a smaller value."
    if name == "eval_temperature" and 0 < value < SMALLEST_TEMPERATURE:
        yield f"SGLang samples greedily below {SMALLEST_TEMPERATURE:g}. Give 0, or a larger value."
    if name == "rollout_top_k" and value == 0:
        yield "must be -1 (no limit) or at least 1. Leave it out for -1."
    if isinstance(value, int):
        if name not in _AT_MOST and not -INT_MAX <= value <= INT_MAX:
            yield f"must fit 32 bits: at most {INT_MAX}. Give a smaller value."
    elif name in _MAY_BE_INFINITE and value == math.inf:
        return
    elif not -FLOAT_MAX <= value <= FLOAT_MAX:
        yield f"must be a finite number of at most {FLOAT_MAX:g}. Give such a number."


def _short(value: object) -> str:
    """Numbers of many digits by their ends."""
    text = str(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:12]}...{text[-12:]} ({len(text)} characters)"
