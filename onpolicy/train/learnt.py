"""The part that the tokens of displayed samples had in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from onpolicy.train.batch import WeighedBatch, completed
from onpolicy.train.correction import TrainedStep
from onpolicy.train.distributed import gather_by_number
from onpolicy.types import LearntTokens


def learnt_tokens(steps: Sequence[TrainedStep]) -> dict[int, LearntTokens]:
    """Return the learnt tokens of the displayed samples of all ranks, by their numbers; collective."""
    pairs = [pair for step in steps for pair in zip(*step, strict=True)]
    ours = {number: found for batch, own in pairs for number, found in _of_batch(batch, own)}
    return gather_by_number(ours)


def _of_batch(batch: WeighedBatch, log_probs: Tensor) -> Iterator[tuple[int, LearntTokens]]:
    shown = [s.sample.is_shown for s in batch.samples]
    if batch.is_filler or not any(shown):
        return
    weighed = completed(batch, log_probs)
    is_learnt = weighed.kept & weighed.mask
    if weighed.learnt is not None:
        is_learnt = is_learnt & weighed.learnt
    weights = weighed.importance_weights * is_learnt
    weights = weighed.with_weights(weights, "objective")
    columns = [x.detach().cpu().split(batch.response_lens) for x in (weighed.advantages, weights)]
    for number, is_shown, advantages, factors in zip(batch.numbers, shown, *columns, strict=True):
        if is_shown:
            yield (
                number,
                LearntTokens(advantages=advantages.tolist(), weights=factors.tolist()),
            )
