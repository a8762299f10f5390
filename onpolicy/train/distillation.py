"""On-policy distillation: a teacher's scores of the tokens that the policy sampled, as advantages or as
a loss.

The reverse KL from policy to teacher is the mean of log p_policy - log p_teacher over the policy's own
samples. Its policy gradient gives each token the advantage log p_teacher - log p_policy, as in slime
and Miles (--use-opd); the KL of later tokens is left out (MiniLLM, arXiv 2306.08543, eq. 3 includes
it). As a loss, the KL between both distributions of each token is differentiated directly
(`ops/reverse_kl.py`). `teachers.py` scores by the teachers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onpolicy.config import TrainConfig
from onpolicy.errors import TrainingError
from onpolicy.train.advantages import Estimator, ScoredTrajectory
from onpolicy.train.distributed import gather_by_number
from onpolicy.train.shares import Outcomes


def with_teacher(config: TrainConfig, estimator: Estimator) -> Estimator:
    """Return the estimator of a run, with its teacher's KL if it has a teacher."""
    flags = config.distillation
    if not flags.names:
        return estimator
    rescored = not config.plan.is_always_on_policy
    coef = flags.opd_kl_coef if flags.opd_loss == "sampled" else 0.0
    return TeacherEstimator(estimator, coef, flags.opd_reward_coef, rescored=rescored)


class TeacherEstimator(Estimator):
    """`reward_coef` times the advantages of another estimator, minus `coef` times the reverse KL of
    each token.

    rescored: whether the policy scores its tokens again. It must where they were sampled under other
    operators or weights, since that mismatch would count as the teacher's KL. Otherwise the rollout's
    log-probabilities are the policy's, bit for bit, and the KL to a teacher with the same weights is
    exactly 0.
    """

    def __init__(self, inner: Estimator, coef: float, reward_coef: float, *, rescored: bool):
        self.inner, self.coef, self.reward_coef = inner, coef, reward_coef
        self.rescored = rescored
        self.roles = inner.roles | {"teacher"}
        if rescored:
            self.roles |= {"policy"}
        self._metrics: dict[str, float] = {}

    def advantages(
        self, outcomes: Outcomes, ours: Mapping[int, ScoredTrajectory]
    ) -> dict[int, Tensor]:
        found = self.inner.advantages(outcomes, ours)
        kls = {number: self.reverse_kl(scored) for number, scored in ours.items()}
        self._metrics = _means(kls)
        return {
            number: self.reward_coef * found[number] - self.coef * kl.to(found[number].device)
            for number, kl in kls.items()
        }

    def returns(self, ours: Mapping[int, ScoredTrajectory]) -> dict[int, Tensor]:
        return self.inner.returns(ours)

    def reverse_kl(self, scored: ScoredTrajectory) -> Tensor:
        """Return log p_policy - log p_teacher of each sampled token, in nats: float32 [R].

        Raises TrainingError for tokens sampled at a temperature other than 1, for which this is not the
        KL.
        """
        trajectory = scored.trajectory
        if other := [t for t in trajectory.temperatures if t != 1]:
            raise TrainingError(
                f"temperature={other[0]}: with a teacher all tokens must be sampled at 1, which the "
                "teacher's distribution is of. Have the episode ask for that."
            )
        teacher: Tensor = scored.scores["teacher"].log_probs
        if self.rescored:
            policy: Tensor = scored.scores["policy"].log_probs
            return policy - teacher
        return torch.tensor(trajectory.rollout_log_probs, dtype=torch.float32).to(teacher) - teacher

    def metrics(self) -> dict[str, float]:
        return {**self.inner.metrics(), **self._metrics}


def _means(kls: Mapping[int, Tensor]) -> dict[str, float]:
    """Return means over all tokens of all ranks, added in the order of the samples' numbers;
    collective."""
    ours = {
        number: (float(kl.double().sum()), float(kl.double().abs().sum()), len(kl))
        for number, kl in kls.items()
    }
    signed, absolute, count = map(sum, zip(*gather_by_number(ours).values(), strict=True))
    return {
        "distillation/reverse_kl": signed / count,
        "distillation/log_prob_abs_diff": absolute / count,
    }
