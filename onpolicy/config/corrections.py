"""Which flags of corrections go together; a combination that would not do what it says is refused."""

from __future__ import annotations

from onpolicy.config.train import TrainConfig
from onpolicy.errors import ConfigError

_RuleBroken = tuple[str, object, bool, str, str]
"""Flag, value, whether the rule is broken, the rule, the remedy."""

_LEAVE_ONE_OUT = "Leave one of the two out."


def validate(config: TrainConfig) -> None:
    """Raise ConfigError for the first combination that cannot be applied."""
    for flag, value, is_broken, rule, remedy in (*_rejection(config), *_kl(config)):
        if is_broken:
            raise ConfigError(f"--{flag}={value}: {rule}. {remedy}")
    if config.fallback.use_rollout_logprobs:
        for flag, value, is_broken, rule, remedy in _bypass(config):
            if is_broken:
                raise ConfigError(f"--{flag}={value}: with --use-rollout-logprobs {rule}. {remedy}")


def _rejection(config: TrainConfig) -> list[_RuleBroken]:
    flags = config.fallback
    statistic, is_divergence = flags.rs_statistic, flags.rs_statistic != "ratio"
    governed, custom = config.governor.mismatch_governor, bool(flags.custom_tis_function_path)
    may_reject = flags.use_rs or governed
    low, high = flags.rejection_bounds
    lowest, largest = flags.weight_bounds
    return [
        ("tis-upper-bound", largest, (flags.use_tis or governed) and not custom and lowest > largest,
         f"--tis-mode clip bounds below by 1 / --tis-upper-bound = {lowest:g} if nothing else is given",
         "Give --tis-lower-bound."),
        ("rs-lower-bound", flags.rs_lower_bound, may_reject and not custom and low > high,
         f"rejection would keep from {low:g} to {high:g}, by the weights' bounds where none is given",
         "Give --rs-lower-bound and --rs-upper-bound."),
        ("rs-upper-bound", None, may_reject and is_divergence and flags.rs_upper_bound is None,
         f"--rs-statistic {statistic} needs it, since bounds of a ratio do not bound a divergence",
         "Give one; verl's is 0.01 for the mean k3 of a sequence."),
        ("rs-lower-bound", flags.rs_lower_bound, is_divergence and flags.rs_lower_bound is not None,
         f"--rs-statistic {statistic} grows on both sides of a ratio of 1, and has an upper bound only",
         "Leave it out."),
    ]  # fmt: skip


def _kl(config: TrainConfig) -> list[_RuleBroken]:
    algorithm, flags = config.algorithm, config.fallback
    kind = algorithm.kl_loss_type
    return [
        ("kl-loss-type", kind, algorithm.use_unbiased_kl and kind == "k2",
         "the mean of k2 is not the KL, so --use-unbiased-kl would not make it unbiased",
         "Use k1, k3 or low_var_kl, or leave --use-unbiased-kl out."),
        ("rejected-in-kl", True, flags.rejected_in_kl and not flags.rejected_in_denominator,
         "with --no-rejected-in-denominator rejected tokens are no part of any mean", _LEAVE_ONE_OUT),
    ]  # fmt: skip


def _bypass(config: TrainConfig) -> list[_RuleBroken]:
    """What the loss of one micro-batch cannot do, or has done already."""
    flags, loss = config.fallback, config.algorithm.policy_loss
    has_ratio, custom = loss != "reinforce", bool(flags.custom_tis_function_path)
    corrects = flags.use_tis or flags.use_rs or flags.rs_veto_threshold is not None or custom
    uses_weights = flags.use_tis and not custom
    recompute = "Leave --use-rollout-logprobs out: then they are computed before the loss."
    return [
        ("use-tis", True, uses_weights and has_ratio,
         f"the ratio of --policy-loss {loss} is pi / pi_rollout, and weights would count it twice",
         "Leave --use-tis out (--use-rs may stay), or use --policy-loss reinforce, which has no ratio."),
        ("policy-loss", loss, not (has_ratio or corrects or config.is_always_aligned),
         "nothing would correct the rollout, since reinforce has no ratio",
         "Add --use-tis or --use-rs, or leave --use-rollout-logprobs out if that is meant."),
        ("tis-batch-normalize", True, uses_weights and flags.tis_batch_normalize,
         "weights come from the loss's own log-probabilities, micro-batch by micro-batch, before their "
         "mean over the global batch is known", recompute),
        ("rejected-in-denominator", False, not (flags.rejected_in_denominator or custom),
         "tokens are rejected micro-batch by micro-batch, before it is known how many of the global "
         "batch are left", recompute),
        ("dc-mode", flags.dc.mode, bool(flags.dc.mode),
         "pi_train is not known before the loss, and advantages are made there", recompute),
    ]  # fmt: skip
