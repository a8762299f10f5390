"""Token batches for the tests of fallback_correction: by hand, random, and spread over ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch
from hypothesis import strategies as st

from fallback_correction.tokens import TokenBatch


def by_log_ratios(sequences, masks=None):
    """A batch whose log pi_train - log pi_rollout are exactly these."""
    r = torch.tensor([x for sequence in sequences for x in sequence], dtype=torch.float32)
    mask = None if masks is None else torch.tensor([m for ms in masks for m in ms]).bool()
    return TokenBatch.packed(r, torch.zeros_like(r), [len(s) for s in sequences], mask)


def select(batch, sequences):
    """The batch of some of the sequences, in the given order, and where its tokens were: int64."""
    starts = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    lengths = [int(batch.lengths[i]) for i in sequences]
    index = [starts[i] + t for i, n in zip(sequences, lengths, strict=True) for t in range(n)]
    index = torch.tensor(index, dtype=torch.int64)
    part = TokenBatch.packed(
        batch.train_log_probs[index], batch.rollout_log_probs[index], lengths, batch.mask[index]
    )
    return part, index


@st.composite
def batches(draw):
    """Up to 6 sequences of up to 5 tokens: empty, masked, far off the rollout or close to it."""
    lengths = draw(st.lists(st.integers(0, 5), max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    n = sum(lengths)
    rollout = -3 * torch.rand(n, generator=generator)
    scale = draw(st.sampled_from([0.01, 0.5, 20.0]))
    train = rollout + scale * torch.randn(n, generator=generator)
    mask = torch.rand(n, generator=generator) < draw(st.sampled_from([0.4, 0.9, 1.0]))
    return TokenBatch.packed(train, rollout, lengths, mask)


@st.composite
def spread_batches(draw):
    """A batch, and its sequences in any order dealt to 1 to 3 ranks: `select`'s parts."""
    batch = draw(batches())
    order = draw(st.permutations(range(len(batch.lengths))))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=2)))
    bounds = [0, *cuts, len(order)]
    ranks = [order[a:b] for a, b in pairwise(bounds)]
    return batch, [select(batch, sequences) for sequences in ranks]


def on_ranks(parts, call):
    """What call(part, gather) returns on every rank, all of them running at once."""
    barrier = threading.Barrier(len(parts), timeout=100)
    sent = [[] for _ in parts]

    def rank(i):
        def gather(values):
            assert values.dtype == torch.float64 and values.dim() == 1
            sent[i].append(values)
            turn = len(sent[i]) - 1
            barrier.wait()
            return torch.cat([vectors[turn] for vectors in sent])

        return call(parts[i], gather)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(rank, range(len(parts))))
