"""Which tokens of a draft a sampler with seeds may take: those that it would have drawn itself.

A token is drawn from its log-probabilities at one number per (seed, position), and a row of a pass has
the same bits whatever rows are beside it. So a pass over a draft draws, at every place up to the first
drafted token that is another than the drawn one, what sampling token by token draws there, and nothing
has to be drawn again. Speculative sampling as published (Leviathan et al., arXiv 2211.17192, algorithm
1) keeps the distribution of the tokens, and not the tokens.
"""

from __future__ import annotations

from torch import Tensor


def num_taken(draft: Tensor, drawn: Tensor) -> Tensor:
    """How many of the drawn tokens are the sample's: those after drafted tokens that were drawn too.

    draft: int64 [B, K], proposed for the next K tokens; drawn: int64 [B, K + 1], drawn after what was
    there and then after each of the proposed ones -> int64 [B], from 1 to K + 1: the first so many of a
    row of `drawn` are its sequence's next tokens.
    """
    agree = (draft == drawn[:, :-1]).long()
    return agree.cumprod(-1).sum(-1) + 1
