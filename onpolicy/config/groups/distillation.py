"""A teacher, whose log-probabilities of the sampled tokens are learnt from."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import ReadBy
from onpolicy.config.kinds import Count, NonNegative
from onpolicy.config.rules import Against, Together

HAS_TEACHER = ReadBy("--teacher-checkpoint", lambda run: run.teacher_checkpoint)


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    teacher_checkpoint: Annotated[
        str,
        Against(lambda run: run.rollout_temperature != 1 and run.rollout_temperature,
            "with --rollout-temperature={found} the student samples from another distribution than "
            "its own, and the teacher's is of temperature 1",
            "Leave --rollout-temperature at 1."),
    ] = ""  # fmt: skip
    """On-policy distillation: checkpoint of a teacher with the same tokenizer, which scores what the
    policy samples. Each token's advantage gets what its log-probability under the teacher is above that
    under the policy: the reverse KL, by its own samples."""

    opd_loss: Annotated[
        Literal["sampled", "top-k", "full"], HAS_TEACHER,
        Against(lambda run: (run.rollout_top_k, run.rollout_top_p, run.rollout_min_p) != (-1, 1, 0),
            "this is the KL over the whole vocabulary, and with --rollout-top-k, --rollout-top-p or "
            "--rollout-min-p the student samples from a part of it", "Leave these out."),
        Against(lambda run: run.train_backend == "megatron" and run.megatron_pp > 1,
            "with --megatron-pp={run.megatron_pp} only the last stage knows what the teacher says",
            "Leave --megatron-pp at 1, or use --opd-loss=sampled."),
    ] = "sampled"  # fmt: skip
    """What the reverse KL of a token is taken over. sampled: the sampled token, and the KL is subtracted
    from its advantage. full: the whole vocabulary; top-k: the --opd-top-k tokens that the teacher finds
    likeliest, and all others as one. Both are terms of the loss, with their own gradient."""

    opd_top_k: Annotated[Count, ReadBy("--opd-loss=top-k", lambda run: run.opd_loss == "top-k")] = (
        64
    )
    """Tokens of --opd-loss=top-k, of which a log-probability each is kept."""

    opd_kl_coef: Annotated[
        NonNegative, HAS_TEACHER,
        Together(lambda run: run.teacher_checkpoint and not run.opd_kl_coef,
            "--opd-kl-coef=0.0: nothing would be learnt from --teacher-checkpoint. Raise it, or leave "
            "the teacher out."),
    ] = 1.0  # fmt: skip
    """Weight of the reverse KL."""

    opd_reward_coef: Annotated[
        NonNegative, HAS_TEACHER,
        Against(lambda run: not run.opd_reward_coef and (
                run.filter_equal_rewards or run.dynamic_sampling),
            "rewards are not learnt from, and --filter-equal-rewards and --dynamic-sampling leave out "
            "groups for theirs", "Leave these out."),
    ] = 1.0  # fmt: skip
    """Weight of the advantages of --advantage-estimator beside it; 0: the teacher alone."""
