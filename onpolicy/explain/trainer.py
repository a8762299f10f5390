"""Recording of a trainer while it scores, on every rank (`Trainer.on_each_rank`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from onpolicy.explain.taps.evidence import Evidence
from onpolicy.explain.taps.policy import passes_of, tapped
from onpolicy.explain.taps.recorder import Call, Recorder
from onpolicy.explain.taps.recording import Recording
from onpolicy.models.policy import PolicyModel
from onpolicy.train.engine import ShardedModel
from onpolicy.train.policy_trainer import PolicyTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The recording of one trainer rank over some forward passes, each with whole rows."""

    tensor_rank: int
    """The rank's number among the ranks that share every linear."""

    passes: list[list[Call]]
    evidence: Evidence | None

    @staticmethod
    def of(
        recorder: Recorder, tensor_rank: int, passes: list[list[Call]], evidence_of: int
    ) -> Recorded:
        """Return a rank's recording; evidence of one tensor-parallel rank is enough."""
        return Recorded(
            tensor_rank=tensor_rank,
            passes=passes,
            evidence=recorder.evidence if tensor_rank == evidence_of else None,
        )


def recorded_log_probs(
    trainer: PolicyTrainer,
    recorder: Recorder,
    sequences: Sequence[list[int]],
    prompt_lens: Sequence[int],
    temperature: float,
    kept_tokens: Sequence[list[bytes]] = (),
    evidence_of: int = 0,
) -> tuple[list[Tensor], Recorded]:
    """Return `Trainer.log_probs`, and this rank's recording of that call by a new recorder.

    evidence_of: the tensor-parallel rank whose evidence is wanted.
    """
    with recording(trainer.policy, recorder) as (rank, passes):
        scores = trainer.log_probs(sequences, prompt_lens, temperature, kept_tokens)
    return scores, Recorded.of(recorder, rank, passes, evidence_of)


@contextmanager
def recording(model: ShardedModel, recorder: Recorder) -> Iterator[tuple[int, list[list[Call]]]]:
    """Record every forward pass of a model; yield this rank's number among the ranks that share
    every linear, and a list that grows by the calls of each pass."""
    if isinstance(model.module, PolicyModel):
        rank, watched = 0, passes_of(model.module, recorder)
    else:
        from onpolicy.explain import megatron  # which may not be installed

        rank, watched = megatron.tensor_rank(), megatron.passes_of(model.module, recorder)
    with model.around_operators(partial(tapped, recorder=recorder)), watched as passes:
        yield rank, passes


def recordings(parts: Sequence[Recorded]) -> list[Recording]:
    """Return the recording of each tensor-parallel rank, merged from ranks that have some rows and
    layers."""
    passes: dict[int, list[list[Call]]] = {}
    for part in parts:
        passes.setdefault(part.tensor_rank, []).extend(part.passes)
    return [Recording.of(own) for _, own in sorted(passes.items())]


def evidence_in(parts: Sequence[Recorded]) -> Evidence | None:
    """Return the evidence of some rank. If several have the prefix, it is the last one's, as its
    row is (`onpolicy.explain.taps.recording.Rows.of`)."""
    return next((p.evidence for p in reversed(parts) if p.evidence is not None), None)
