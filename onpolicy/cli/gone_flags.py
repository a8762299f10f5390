"""Names that are no flags here, with what to use in their place.

They are flags, flag values and commands of earlier releases, and the names of our flags in other
libraries: TRL's GRPOConfig, verl's overrides, prime-rl's and OpenRLHF's flags. Names of slime and
Miles are our own. Only names with the same meaning are listed; values may have other units.
"""

import re
from collections.abc import Sequence

from onpolicy.errors import ConfigError

_ADVICE: dict[str, tuple[str, ...]] = {
    "examples/deploy/compress.py writes what a run with rounded weights deployed.": (
        "--activations", "--quantised",
    ),
    "Leave it out: AdamW's first moment decays by 0.9.": ("--adam-beta1",),
    "Leave it out: AdamW adds 1e-8.": ("--adam-eps",),
    "Use --rewards NAME=WEIGHT with grpo, whose sum is normalised.": (
        "--advantage-estimator gdpo", "--gdpo-reward-keys", "--gdpo-reward-weights",
    ),
    "Use --advantage-estimator grpo, dr_grpo or rloo.": (
        "--advantage-estimator grpo_batch", "--advantage-estimator grpo_passk",
        "--advantage-estimator opo", "--advantage-estimator remax", "--recipe lite_ppo", "--recipe opo",
        "--recipe remax",
    ),
    "--true-on-policy-mode aligns all kinds of operators.": ("--align",),
    "onpolicy explain names the first operator that differs, without it.": ("--attribution", "--orders"),
    "Leave it out: all tokens of a step are learnt from.": (
        "--clip-cov-lb", "--clip-cov-ratio", "--clip-cov-ub", "--kl-cov-coef", "--kl-cov-ratio",
        "--recipe clip_cov", "--recipe kl_cov", "--top-entropy-quantile",
    ),
    "Leave it out: the critic has no warm-up.": ("--critic-lr-warmup-iters",),
    "Leave it out: a prompt's last visit says its pass rate, and each has a chance of 0.05.": (
        "--curriculum-floor", "--curriculum-window",
    ),
    "Leave it out: the paper's value is used. fallback_correction takes others.": (
        "--dc-average", "--dc-lambda-max", "--dc-lambda-min", "--length-decay-baseline-window",
        "--length-decay-burn-in", "--length-decay-confirmation-steps", "--length-decay-factor",
        "--length-decay-floor", "--length-decay-level-ratio", "--length-decay-max-rise-steps",
        "--length-decay-max-truncated-ratio", "--length-decay-onset-multiplier",
        "--length-decay-onset-ratio", "--length-decay-rise-ratio", "--length-decay-slow-rise-steps",
    ),
    "Use --dc-mode fixed, which charges every mismatch.": ("--dc-margin", "--dc-mode margin"),
    "Leave it out: a run ends after 10 groups without a signal for each that it needs.": (
        "--dynamic-sampling-limit",
    ),
    "Use a fixed --entropy-coef.": (
        "--entropy-coef-delta", "--entropy-coef-max", "--entropy-ctrl", "--entropy-target",
    ),
    "Give top_p or top_k to the sets of --eval-config.": ("--eval-top-k", "--eval-top-p"),
    "Use --policy-loss reinforce.": ("--force-on-policy-ratio",),
    "Leave it out: agents call the model policy.": ("--gateway-model-name",),
    "Leave it out: a session samples 64 answers at once.": ("--gateway-parallel-answers",),
    "Leave it out; the library fallback_correction has the setting.": (
        "--governor-calm", "--governor-ess", "--governor-log-ppl-abs-diff", "--governor-lr-scale",
        "--rs-veto-by", "--tis-log-ratio-clamp",
    ),
    "Use --policy-loss gspo for ratios of sequences, or --custom-loss-path.": (
        "--importance-sampling-level",
    ),
    "Leave it out: the judge answers greedily.": ("--judge-temperature",),
    "Use a fixed --kl-coef.": ("--kl-ctrl", "--kl-horizon", "--kl-target"),
    "Leave it out: rewards pay k1, log pi - log pi_ref.": ("--kl-penalty",),
    "Use --kl-coef, or --use-kl-loss.": ("--log-ratio-coef",),
    "Leave it out: samples of each rollout are written; --log-samples says how many.": (
        "--log-samples-interval",
    ),
    "Leave it out: adapters are two factors without magnitudes.": ("--lora-dora",),
    "Leave it out: each run with adapters starts servers of its own.": ("--lora-name", "--lora-names"),
    "Reject by --use-rs, or give it as --custom-tis-function-path.": ("--m2po-threshold",),
    "Leave it out: data-parallel ranks share the state of the optimizer.": (
        "--megatron-distributed-optimizer",
    ),
    "Leave it out: tokens come to their experts by all-to-all.": ("--megatron-moe-dispatcher",),
    "Leave it out: mixtures of experts compute activations again.": ("--moe-activation-checkpointing",),
    "Leave it out: advantages of gae are whitened.": ("--normalize-advantages",),
    "Reject drifted sequences by --use-rs --rs-level geometric.": ("--opsm-delta", "--use-opsm"),
    "Leave it out: an answer of the longest length pays 1.": ("--overlong-penalty-factor",),
    "Leave it out: hosts are waited for 300 seconds.": ("--placement-timeout",),
    "Give it as --custom-loss-path (docs/losses.md).": (
        "--policy-loss dppo_kl", "--policy-loss dppo_tv", "--policy-loss gmpo",
        "--policy-loss gspo_token", "--policy-loss ipo", "--policy-loss ratio_mask",
        "--policy-loss sapo", "--policy-loss vespo", "--recipe dppo", "--recipe gmpo", "--recipe sapo",
        "--recipe vespo", "--sapo-tau-neg", "--sapo-tau-pos", "--vespo-k-neg", "--vespo-k-pos",
        "--vespo-lambda-neg", "--vespo-lambda-pos",
    ),
    "Learn good samples by `onpolicy sft`.": ("--positive-nll-above", "--positive-nll-coef"),
    "Use --true-on-policy-mode, which adds gradients in that order.": ("--rank-invariant",),
    "Leave it out: all tokens are drawn again.": ("--redraw-share",),
    "Leave it out: rejected tokens pay no KL.": ("--rejected-in-kl",),
    "Serve it by SGLang itself, and use --rm-type remote_rm (examples/reward_model).": (
        "--reward-api-key", "--reward-checkpoint", "--reward-input", "--reward-num-engines",
        "--reward-server-url", "--rm-type model",
    ),
    "Leave it out: a request has at most 16 samples.": ("--rm-batch-size",),
    "Leave it out: 8 failures in a row end the requests of a rollout.": ("--rm-breaker",),
    "Use --rollout-activation-format fp8_e4m3.": ("--rollout-activation-format int8",),
    "Leave it out: the cache is in --dtype.": ("--rollout-kv-format",),
    "Leave it out: stock servers get adapters merged into their weights.": ("--rollout-lora",),
    "Use --rollout-num-engines, and --sglang-tp-size for the GPUs of each.": (
        "--rollout-num-gpus", "--rollout-num-gpus-per-engine",
    ),
    "Leave it out: servers keep weights in --dtype, with the same bits.": ("--rollout-pack-weights",),
    "Use --rollout-schedule free, which goes on with responses too.": ("--rollout-segment-tokens",),
    "Leave it out: the tokens that end a text or a turn end a response.": (
        "--rollout-stop-at-turn-ends",
    ),
    "Use --rollout-weight-format int3 or int4_group128.": ("--rollout-weight-format int3_group128",),
    "Use --rollout-weight-format int4_group128.": (
        "--rollout-weight-format mxfp4", "--rollout-weight-format nvfp4",
    ),
    "Use --rs-rules, as in --rs-rules seq_mean_k3=0.01.": ("--rs-statistic",),
    "Leave it out: each evaluation metric is better the larger it is.": ("--save-best-mode",),
    "Call the field tools.": ("--tool-key",),
    "Leave it out: the base of adapters is rounded and kept in --dtype.": ("--train-pack-weights",),
    "Leave it out; --kl-loss-type k2 has the gradient of the KL on-policy.": ("--use-unbiased-kl",),
    "Leave it out: values are clipped at 0.2.": ("--value-clip",),
    "Set WANDB_RUN_GROUP.": ("--wandb-group",),
    "Set WANDB_PROJECT.": ("--wandb-project",),
    "Leave it out: a run goes on without Weights & Biases.": ("--wandb-required",),
    "Set WANDB_NAME.": ("--wandb-run-name",),
}  # fmt: skip
"""The flags, as `--flag` or `--flag value`, and commands that are gone, by what to use instead."""

GONE = {flag: advice for advice, flags in _ADVICE.items() for flag in flags}


def require_not_gone(arguments: Sequence[str]) -> None:
    """Raise ConfigError for the first flag, or value of a flag, that is gone."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = argument.partition("=")
        flag = name.replace("_", "-").replace("--no-", "--", 1)
        with_value = f"{flag} {value if equals else following}"
        for gone in (flag, with_value):
            if gone in GONE:
                raise ConfigError(f"{gone}: was removed from onpolicy. {GONE[gone]}")


OURS = {
    # TRL
    "num_generations": "n_samples_per_prompt",
    "max_completion_length": "rollout_max_response_len",
    "max_steps": "num_rollout",
    "model_name_or_path": "hf_checkpoint",
    "dataset_name": "prompt_data",
    "reward_funcs": "custom_rm_path",
    "learning_rate": "lr",
    "beta": "kl_loss_coef",
    "epsilon": "eps_clip",
    "epsilon_high": "eps_clip_high",
    "temperature": "rollout_temperature",
    "max_grad_norm": "clip_grad",
    "output_dir": "run_dir",
    "save_steps": "save_interval",
    "resume_from_checkpoint": "load",
    "warmup_steps": "lr_warmup_steps",
    "lr_scheduler_type": "lr_decay_style",
    # OpenRLHF
    "pretrain": "hf_checkpoint",
    "actor_learning_rate": "lr",
    "init_kl_coef": "kl_coef",
    "generate_max_len": "rollout_max_response_len",
    "ckpt_path": "save",
    # verl, without the groups before the last names
    "model.path": "hf_checkpoint",
    "rollout.n": "n_samples_per_prompt",
    "rollout.temperature": "rollout_temperature",
    "optim.lr": "lr",
    "train_files": "prompt_data",
    "val_files": "eval_prompt_data",
    "train_batch_size": "rollout_batch_size",
    "ppo_mini_batch_size": "global_batch_size",
    "max_response_length": "rollout_max_response_len",
    "adv_estimator": "advantage_estimator",
    "clip_ratio": "eps_clip",
    "clip_ratio_high": "eps_clip_high",
    "custom_reward_function.path": "custom_rm_path",
    "default_local_dir": "save",
    "save_freq": "save_interval",
    "total_training_steps": "num_rollout",
    # prime-rl
    "group_size": "n_samples_per_prompt",
}
"""The names of our flags by other libraries' names, with underscores."""

_OVERRIDE = re.compile(
    r"\+{0,2}((?:actor_rollout_ref|algorithm|critic|custom_reward_function|data|reward_model|trainer)"
    r"(?:\.\w+)+)=.*",
    re.DOTALL,
)


def ours_for(name: str) -> str | None:
    """Return our flag's name for another library's name or a verl path, or None if it is unknown."""
    parts = name.lstrip("-").replace("-", "_").split(".")
    return OURS.get(".".join(parts[-2:])) or OURS.get(parts[-1])


def override_in(argument: str) -> str | None:
    """Return the path that an argument sets if it is a verl override (`path=value`), else None."""
    match = _OVERRIDE.fullmatch(argument)
    return match[1] if match else None
