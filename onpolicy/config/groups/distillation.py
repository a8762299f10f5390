"""A teacher, whose log-probabilities of the sampled tokens are learnt from."""

from dataclasses import dataclass
from typing import Annotated

from fallback_correction.ranges import ReadBy
from onpolicy.config.kinds import NonNegative
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

    opd_kl_coef: Annotated[
        NonNegative, HAS_TEACHER,
        Together(lambda run: run.teacher_checkpoint and not run.opd_kl_coef,
            "--opd-kl-coef=0.0: nothing would be learnt from --teacher-checkpoint. Raise it, or leave "
            "the teacher out."),
    ] = 1.0  # fmt: skip
    """Weight of that difference."""

    opd_reward_coef: Annotated[
        NonNegative, HAS_TEACHER,
        Against(lambda run: not run.opd_reward_coef and (
                run.filter_equal_rewards or run.dynamic_sampling),
            "rewards are not learnt from, and --filter-equal-rewards and --dynamic-sampling leave out "
            "groups for theirs", "Leave these out."),
    ] = 1.0  # fmt: skip
    """Weight of the advantages of --advantage-estimator beside it; 0: the teacher alone."""
