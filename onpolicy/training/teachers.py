"""The teachers of a run, for on-policy distillation: each scores its own samples.

A teacher's scores of the tokens that the policy sampled become advantages, or the inputs of a loss. The
reverse KL from policy to teacher is the mean of log p_policy - log p_teacher over the policy's own
samples. Its policy gradient gives each token the advantage log p_teacher - log p_policy, as in slime
and Miles (--use-opd); the KL of later tokens is left out (MiniLLM, arXiv 2306.08543, eq. 3 includes
it). As a loss, the KL between both distributions of each token is differentiated directly
(`ops/reverse_kl.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onpolicy.config import TrainConfig
from onpolicy.errors import TrainingError
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PackedTokens
from onpolicy.ops.log_probs import Head, Scores
from onpolicy.ops.reverse_kl import (
    RoutedTeacher,
    TeacherRows,
    ToldTeacher,
    TopKTeacher,
    WholeTeacher,
)
from onpolicy.training.advantages import Estimator, ScoredTrajectory
from onpolicy.training.batch import MicroBatch, packed_batch
from onpolicy.training.distributed import gather_by_number
from onpolicy.training.engine import Role, ShardedModel
from onpolicy.training.shares import Outcomes

PREFIX = "teacher:"


def teacher_role(name: str) -> Role:
    """Return the role of a teacher's model."""
    return PREFIX + name


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """The teachers of a run, by name; a single one has the empty name."""

    models: Mapping[str, ShardedModel]

    key: str
    """Field of a prompt's row that names its teacher; empty with one teacher."""

    is_loss: bool
    """Whether the KL is a loss, instead of a part of the advantages."""

    top_k: int | None
    """Number of tokens whose log-probabilities a loss keeps; None: the whole distribution."""

    vocab_size: int
    """Vocabulary size of the policy."""

    @staticmethod
    def of(
        config: TrainConfig, models: Mapping[Role, ShardedModel]
    ) -> Teachers | AskedTeachers | None:
        """Return the teachers of a run, if it has any."""
        flags = config.distillation
        if not flags.teachers:
            return AskedTeachers(flags.loss_top_k) if flags.teacher_urls else None
        policy = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
        return Teachers(
            models={name: models[teacher_role(name)] for name in flags.teachers},
            key=flags.teacher_key,
            is_loss=flags.opd_loss != "sampled",
            top_k=flags.loss_top_k or None,
            vocab_size=policy.vocab_size,
        )

    def score(self, batches: Sequence[MicroBatch]) -> tuple[list[Scores], list[MicroBatch]]:
        """Return each micro-batch's scores by its samples' teachers, and the micro-batches with the
        inputs of a distillation loss; collective.

        Raises TrainingError for a loss on tokens that were drawn from a part of the vocabulary.
        """
        if self.is_loss and any(batch.packed.kept is not None for batch in batches):
            raise TrainingError(
                "top_p, top_k or min_p: --opd-loss takes the KL over the whole vocabulary, and some "
                "tokens were drawn from a part of it. Have the episode ask for all of it."
            )
        said = {
            name: self._ask(model, [self._part(batch, name) for batch in batches])
            for name, model in self.models.items()
        }
        found, taught = [], []
        for i, batch in enumerate(batches):
            whole = _joined([(*said[name][i], self._rows(batch, name)) for name in said])
            found.append(whole[0])
            taught.append(replace(batch, packed=replace(batch.packed, teacher=whole[1])))
        return found, taught

    def _ask(
        self, model: ShardedModel, parts: Sequence[PackedTokens]
    ) -> list[tuple[Scores, TeacherRows | None]]:
        scores: list[Any] = model.score([replace(p, wants_hidden=self.is_loss) for p in parts])
        if not self.is_loss:
            return [(each, None) for each in scores]
        head = model.head()
        return [(Scores(*each[:-1]), self._teacher_rows(each.hidden, head)) for each in scores]

    def _teacher_rows(self, hidden: Tensor, head: Head) -> TeacherRows:
        if self.top_k is None:
            return WholeTeacher(hidden, head)
        return TopKTeacher.of(hidden, head, self.top_k, self.vocab_size)

    def _is_of(self, batch: MicroBatch, name: str) -> list[bool]:
        """Return which samples this teacher scores. A filler belongs to the first teacher."""
        if not self.key or batch.is_filler:
            return [name == next(iter(self.models))] * len(batch.samples)
        return [s.prompt.metadata[self.key] == name for s in batch.samples]

    def _part(self, batch: MicroBatch, name: str) -> PackedTokens:
        """Pack this teacher's samples of a micro-batch; a filler if there are none, since all ranks
        must run equally many forward passes."""
        mine = self._is_of(batch, name)
        if all(mine):
            return batch.packed.with_own_routing()
        numbered = zip(batch.numbers, batch.samples, mine, strict=True)
        samples = {n: s for n, s, is_mine in numbered if is_mine}
        part = packed_batch(samples, batch.mask.device, batch.packed.shared_rows is not None)
        return part.packed.with_own_routing()

    def _rows(self, batch: MicroBatch, name: str) -> Tensor:
        """Return the indices of this teacher's R' tokens among the R of the micro-batch: int64 [R']."""
        mine, lens = self._is_of(batch, name), batch.response_lens
        flags = torch.tensor([m for m, n in zip(mine, lens, strict=True) for _ in range(n)])
        return flags.nonzero()[:, 0].to(batch.mask.device)


def _joined(
    parts: Sequence[tuple[Scores, TeacherRows | None, Tensor]],
) -> tuple[Scores, TeacherRows | None]:
    """Merge the teachers' scores of their rows of a micro-batch."""
    if len(parts) == 1:
        return parts[0][:2]
    asked = [(scores, rows) for scores, _, rows in parts if len(rows)]
    # Concatenated by teacher, the rows return to the micro-batch's order by this index.
    order = torch.cat([rows for _, rows in asked]).argsort()
    columns = zip(*(scores for scores, _ in asked), strict=True)
    scores = Scores(*(torch.cat(column)[order] for column in columns))
    said = [(teacher, rows) for _, teacher, rows in parts if teacher is not None]
    return scores, RoutedTeacher.of(said, len(order)) if said else None


class Told(NamedTuple):
    """A server's scores of the sampled tokens."""

    log_probs: Tensor
    """Log-probabilities, float32 [R]."""


@dataclass(frozen=True)
class AskedTeachers:
    """Teacher servers that scored the samples before they came to the trainer
    (`run/teacher_servers.py`)."""

    top_k: int
    """Number of tokens of a loss; 0: the KL is a part of the advantages."""

    def score(self, batches: Sequence[MicroBatch]) -> tuple[list[Told], list[MicroBatch]]:
        """Return the scores that came with the samples of each micro-batch; 0 for a filler."""
        told = [Told(_told(batch)) for batch in batches]
        return told, [self._taught(batch) for batch in batches] if self.top_k else [*batches]

    def _taught(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch with the inputs of a distillation loss."""
        said = [s.teacher_top for s in batch.samples if s.teacher_top is not None]
        tokens = [row for ids, _ in said for row in ids]
        log_probs = [row for _, values in said for row in values]
        if batch.is_filler:
            count = len(batch.rollout_log_probs)
            tokens, log_probs = [[*range(self.top_k)]] * count, [[0.0] * self.top_k] * count
        device = batch.mask.device
        teacher = ToldTeacher(
            torch.tensor(tokens, dtype=torch.int64, device=device).view(-1, self.top_k),
            torch.tensor(log_probs, dtype=torch.float32, device=device).view(-1, self.top_k),
        )
        return replace(batch, packed=replace(batch.packed, teacher=teacher))


def _told(batch: MicroBatch) -> Tensor:
    if batch.is_filler:
        return torch.zeros_like(batch.rollout_log_probs)
    said = [x for sample in batch.samples for x in sample.teacher_log_probs or ()]
    return torch.tensor(said, dtype=torch.float32, device=batch.mask.device)


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
        self.rescored, self.reads_squares = rescored, inner.reads_squares
        self.roles = inner.roles | {"teacher"}
        if rescored:
            self.roles |= {"policy"}

    def advantages(
        self, outcomes: Outcomes, ours: Mapping[int, ScoredTrajectory]
    ) -> dict[int, Tensor]:
        found = self.inner.advantages(outcomes, ours)
        kls = {number: self.reverse_kl(scored) for number, scored in ours.items()}
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
        return torch.tensor(trajectory.rollout_log_probs.array).to(teacher) - teacher

    def metrics(self, ours: Mapping[int, ScoredTrajectory]) -> dict[str, float]:
        kls = {number: self.reverse_kl(scored) for number, scored in ours.items()}
        return {**self.inner.metrics(ours), **_means(kls)}


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
