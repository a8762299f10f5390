"""Which corrections mean something together; what would not be applied as it says is refused."""

from __future__ import annotations

from onpolicy.config.flags import flag_values, spelled
from onpolicy.config.train import TrainConfig
from onpolicy.errors import ConfigError

_RuleBroken = tuple[str, object, bool, str, str]
"""Flag, value, whether the rule is broken, the rule, the remedy."""

_LEAVE_ONE_OUT = "Leave one of the two out."


def validate(config: TrainConfig) -> None:
    """Raise ConfigError for the first combination that cannot be applied."""
    rows = (
        *_what_the_run_does(config),
        *_lag(config),
        *_rejection(config),
        *_kl(config),
        *_bypass(config),
    )
    for name, value, is_broken, rule, remedy in rows:
        if is_broken:
            raise ConfigError(f"{spelled(name)}={value}: {rule}. {remedy}")


def _what_the_run_does(config: TrainConfig) -> list[_RuleBroken]:
    """A correction that nothing would apply, or that contradicts what else is asked for."""
    flags, plan, values = config.fallback, config.plan, flag_values(config.fallback)
    governed, falls_back = plan.is_governed, plan.on_aligned_mismatch == "fall back"
    aligned = plan.starts_aligned and not governed
    on_policy = aligned and not plan.may_lag
    weight_format, kinds = config.engine.rollout_weight_format, config.operators.align
    return [
        *((name, values[name], on_policy and not falls_back,
           "with --true-on-policy-mode the ratio is exactly 1 and there is nothing to correct",
           "Leave it out, or add --parity-policy fallback to have it at hand for a mismatch.")
          for name in plan.corrections),
        ("parity_policy", "fallback", falls_back and not plan.may_align,
         "without aligned operators every rollout is corrected anyway",
         "Add --true-on-policy-mode, or give --use-tis without it."),
        ("parity_policy", "fallback", falls_back and not plan.corrections,
         "needs a correction to fall back to",
         "Add --use-tis, --use-rs, --dc-mode or --custom-tis-function-path."),
        ("rollout_weight_format", weight_format, bool(weight_format) and aligned,
         "with --true-on-policy-mode the servers hold the trainer's weights, bit for bit",
         _LEAVE_ONE_OUT),
        ("use_rollout_routing_replay", True, flags.use_rollout_routing_replay and aligned,
         "with --true-on-policy-mode both engines choose the same experts",
         _LEAVE_ONE_OUT),
        ("rollout_weight_format", weight_format, bool(weight_format and kinds),
         "with --align the servers hold the trainer's weights, bit for bit", _LEAVE_ONE_OUT),
        ("use_rollout_routing_replay", True, flags.use_rollout_routing_replay and bool(kinds),
         "with --align the engine runs the trainer's modelling code, whose choices of experts SGLang "
         "does not record", _LEAVE_ONE_OUT),
        ("mismatch_governor", True, governed and bool(kinds),
         "its ladder goes from stock engines to aligned ones, and --align is neither",
         _LEAVE_ONE_OUT),
        ("mismatch_governor", True, governed and bool(config.engine.rollout_server_url),
         "with --rollout-server-url it cannot start servers under another contract",
         _LEAVE_ONE_OUT),
        ("mismatch_governor", True, governed and flags.use_rollout_logprobs,
         "with --use-rollout-logprobs the loss corrects the rollout, on every rung",
         _LEAVE_ONE_OUT),
    ]  # fmt: skip


def _lag(config: TrainConfig) -> list[_RuleBroken]:
    """What contradicts samples of earlier weights, or leaves nothing to do."""
    rollout, steps = config.rollout, config.rollout.num_rollout
    lag, segment = rollout.rollout_lag, rollout.rollout_segment_tokens
    longest, samples = rollout.rollout_max_response_len, rollout.n_samples_per_prompt
    ways = {
        "rollout_lag": lag or None,
        "rollout_segment_tokens": segment or None,
        "rollout_schedule": rollout.rollout_schedule,
    }
    name, value = next((name, value) for name, value in ways.items() if value is not None)
    return [
        *_free(config),
        ("rollout_lag", lag, lag >= steps > 0 and lag > 0,
         f"with --num-rollout={steps} all samples would be those of the first weights",
         f"Give at most {steps - 1}."),
        ("rollout_lag", lag, lag > 0 and config.engine.colocate,
         "with --colocate the servers give their memory back while the trainer computes, and with a lag "
         "they sample then",
         _LEAVE_ONE_OUT),
        ("rollout_segment_tokens", segment, segment > longest,
         f"no response is longer than --rollout-max-response-len={longest}",
         "Give less, or leave it out for whole responses."),
        (name, value, config.plan.may_lag and config.plan.on_aligned_mismatch == "fall back",
         "samples of earlier weights are corrected in any case, whether engines mismatch or not",
         "Leave --parity-policy out: a mismatch that the probe of each push finds ends the run."),
        ("dynamic_sampling", True, rollout.dynamic_sampling and samples < 2,
         f"the rewards of a group of --n-samples-per-prompt={samples} are always equal",
         "Raise that to 2 or more."),
        ("dynamic_sampling", True, rollout.dynamic_sampling and config.algorithm.filter_equal_rewards,
         "draws others for the groups that --filter-equal-rewards leaves out",
         _LEAVE_ONE_OUT),
    ]  # fmt: skip


def _free(config: TrainConfig) -> list[_RuleBroken]:
    """What contradicts a schedule that is the clock's."""
    rollout, is_free = config.rollout, config.rollout.rollout_schedule == "free"
    rules = {
        "rollout_lag": rollout.rollout_lag,
        "rollout_segment_tokens": rollout.rollout_segment_tokens,
    }
    return [
        *((name, value, is_free and bool(value),
           "with --rollout-schedule free the clock decides which weights a token comes from",
           _LEAVE_ONE_OUT)
          for name, value in rules.items()),
        ("dynamic_sampling", True, is_free and rollout.dynamic_sampling,
         "draws groups in the place of others by rule, and with --rollout-schedule free the clock "
         "decides what is drawn", "Leave one of the two out; --filter-equal-rewards may stay."),
        ("mismatch_governor", True, is_free and config.plan.is_governed,
         "it starts servers under another contract when they draw nothing, and with --rollout-schedule "
         "free they always draw", _LEAVE_ONE_OUT),
        ("colocate", True, is_free and config.engine.colocate,
         "servers give their memory back while the trainer computes, and with --rollout-schedule free "
         "they sample meanwhile", _LEAVE_ONE_OUT),
        ("replay", rollout.replay,
         is_free and bool(rollout.replay) and not config.plan.starts_aligned,
         "without --true-on-policy-mode a token depends on the batch that it was sampled in, which no "
         "journal repeats", "Replay a run of that mode."),
    ]  # fmt: skip


def _rejection(config: TrainConfig) -> list[_RuleBroken]:
    flags = config.fallback
    statistic, is_divergence = flags.rs_statistic, flags.rs_statistic != "ratio"
    governed, custom = config.plan.is_governed, bool(flags.custom_tis_function_path)
    may_reject, weighs = flags.use_rs or governed, flags.use_tis or governed or config.plan.may_lag
    low, high = flags.rejection_bounds
    lowest, largest = flags.weight_bounds
    return [
        ("tis_upper_bound", largest, weighs and not custom and lowest > largest,
         f"--tis-mode clip bounds below by 1 / --tis-upper-bound = {lowest:g} if nothing else is given",
         "Give --tis-lower-bound."),
        ("rs_lower_bound", flags.rs_lower_bound, may_reject and not custom and low > high,
         f"rejection would keep from {low:g} to {high:g}, by the weights' bounds where none is given",
         "Give --rs-lower-bound and --rs-upper-bound."),
        ("rs_upper_bound", None, may_reject and is_divergence and flags.rs_upper_bound is None,
         f"--rs-statistic {statistic} needs it, since bounds of a ratio do not bound a divergence",
         "Give one; verl's is 0.01 for the mean k3 of a sequence."),
        ("rs_lower_bound", flags.rs_lower_bound, is_divergence and flags.rs_lower_bound is not None,
         f"--rs-statistic {statistic} grows on both sides of a ratio of 1, and has an upper bound only",
         "Leave it out."),
    ]  # fmt: skip


def _kl(config: TrainConfig) -> list[_RuleBroken]:
    algorithm, flags = config.algorithm, config.fallback
    kind = algorithm.kl_loss_type
    return [
        ("kl_loss_type", kind, algorithm.use_unbiased_kl and kind == "k2",
         "the mean of k2 is not the KL, so --use-unbiased-kl would not make it unbiased",
         "Use k1, k3 or low_var_kl, or leave --use-unbiased-kl out."),
        ("rejected_in_kl", True, flags.rejected_in_kl and not flags.rejected_in_denominator,
         "with --no-rejected-in-denominator rejected tokens are no part of any mean", _LEAVE_ONE_OUT),
    ]  # fmt: skip


def _bypass(config: TrainConfig) -> list[_RuleBroken]:
    """What the loss of one micro-batch cannot do, or has done already."""
    flags, loss = config.fallback, config.algorithm.policy_loss
    plan, has_ratio = config.plan, loss != "reinforce"
    custom = bool(flags.custom_tis_function_path)
    uses_weights = flags.use_tis and not custom
    recompute = "Leave --use-rollout-logprobs out: then they are computed before the loss."
    rows = [
        ("use_tis", True, uses_weights and has_ratio,
         f"the ratio of --policy-loss {loss} is pi / pi_rollout, and weights would count it twice",
         "Leave --use-tis out (--use-rs may stay), or use --policy-loss reinforce, which has no ratio."),
        ("policy_loss", loss, not (has_ratio or plan.corrections or plan.is_always_on_policy),
         "nothing would correct the rollout, since reinforce has no ratio",
         "Add --use-tis or --use-rs, or leave --use-rollout-logprobs out if that is meant."),
        ("tis_batch_normalize", True, uses_weights and flags.tis_batch_normalize,
         "weights come from the loss's own log-probabilities, micro-batch by micro-batch, before their "
         "mean over the global batch is known", recompute),
        ("rejected_in_denominator", False, not (flags.rejected_in_denominator or custom),
         "tokens are rejected micro-batch by micro-batch, before it is known how many of the global "
         "batch are left", recompute),
        ("dc_mode", flags.dc.mode, bool(flags.dc.mode),
         "pi_train is not known before the loss, and advantages are made there", recompute),
    ]  # fmt: skip
    return [
        (name, value, flags.use_rollout_logprobs and is_broken,
         f"with --use-rollout-logprobs {rule}", remedy)
        for name, value, is_broken, rule, remedy in rows
    ]  # fmt: skip
