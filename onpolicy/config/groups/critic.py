"""The flags of the critic of `--advantage-estimator gae`."""

from dataclasses import dataclass
from typing import Annotated

from fallback_correction.ranges import ReadBy, at_least, at_most
from onpolicy.config.kinds import CountOrZero, NonNegative
from onpolicy.config.rules import Against

BY_CRITIC = ReadBy("--advantage-estimator gae", lambda run: run.advantage_estimator == "gae")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    critic_load: str = ""
    """Checkpoint that the critic begins with, a causal language model or one with a value head
    (`score.weight`); --hf-checkpoint if not given. A head that is not there begins with zeros."""

    critic_lr: Annotated[float | None, at_least(0)] = None
    """Peak learning rate of the critic; --lr if not given."""

    critic_lr_warmup_iters: CountOrZero = 0
    """Optimizer steps of the critic's linear warm-up; --lr-decay-style shapes what follows."""

    num_critic_only_steps: Annotated[
        CountOrZero,
        Against(
            lambda run: 0 < run.num_rollout <= run.num_critic_only_steps,
            "the policy would learn from none of the {run.num_rollout} rollouts",
            "Lower it, or raise --num-rollout.",
        ),
    ] = 0
    """First rollouts, of which the critic learns alone."""

    lambd: Annotated[float, at_least(0), at_most(1)] = 1.0
    """GAE's lambda: 1 takes all that comes after a token as it was, 0 the critic's word for it."""

    value_clip: NonNegative = 0.2
    """How far a value's loss follows it away from the value before the rollout's first step."""

    normalize_advantages: bool = True
    """Whiten advantages over the sampled tokens of the rollout."""
