"""One rank's part of a packed micro-batch, on its way through Megatron's modules.

Under context parallelism a sequence is cut into 2 x c chunks of equal length, and rank r of c holds
chunks r and 2c - 1 - r, so that all ranks compute about as many attention scores (Megatron's zigzag).
The order of rows is: the first chunk of every sequence, then the second of every sequence. Sequences
are padded at their ends for that; causal attention hides the padding from earlier tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from onpolicy.models.expert_layers import OWN_CHOICE
from onpolicy.models.policy import AskedTokens, PackedTokens
from onpolicy.ops import AttentionLayout
from onpolicy.training.megatron.config import AlignedConfig

FILLER_TOKEN = 0


@dataclass(kw_only=True)
class LocalTokens(PackedSeqParams):
    """One rank's tokens of a micro-batch. T: its tokens, before sequence parallelism shards them; R:
    the tokens to score."""

    qkv_format: str = "thd"

    tokens: Tensor
    """Token ids, int64 [1, T]."""

    positions: Tensor
    """Positions within each sequence, int64 [1, T]."""

    layouts: tuple[AttentionLayout, ...]
    """Attention layouts of equal parts of the rows: one, or one for each chunk under context
    parallelism."""

    angles: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of the rotary embedding, [1, T, D]."""

    asked: AskedTokens
    """R' tokens to score, padded to the largest number of any rank; no rows are shared under context
    parallelism."""

    order: Tensor | None = None
    """Index of each scored token among the ranks' R' each, int64 [R]; None: all are here, in order."""

    routed_experts: Tensor | None = None
    """Experts to replay, int64 [T, layers x k], as in `PackedTokens`; under sequence parallelism, of
    this rank's rows."""

    @staticmethod
    def of(batch: PackedTokens, config: AlignedConfig, context_rank: int) -> LocalTokens:
        """Return the part of `batch` that rank `context_rank` of the context-parallel group computes."""
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        if config.context_parallel_size > 1:
            return _zigzag(batch, config.context_parallel_size, context_rank, multiple)
        return _whole(batch, multiple)


def _whole(batch: PackedTokens, multiple: int) -> LocalTokens:
    """Return all tokens, padded by a filler sequence to a multiple."""
    filler = -len(batch.tokens) % multiple
    layout = _with_filler(batch.layout, filler) if filler else batch.layout
    return LocalTokens(
        tokens=F.pad(batch.tokens, (0, filler), value=FILLER_TOKEN)[None],
        positions=F.pad(batch.positions, (0, filler))[None],
        layouts=(layout,),
        asked=batch,
        routed_experts=_pad_experts(batch, torch.arange(len(batch.tokens)), filler),
    )


def _with_filler(layout: AttentionLayout, count: int) -> AttentionLayout:
    """Append a sequence of `count` tokens to a layout."""
    first = sum(layout.query_lens)
    own = torch.arange(first, first + count, device=layout.key_rows.device)
    return AttentionLayout(
        query_lens=(*layout.query_lens, count),
        key_lens=(*layout.key_lens, count),
        key_rows=pad_sequence([*layout.key_rows, own], batch_first=True),
        shared_keys=layout.shared_keys and layout.shared_keys.then(first, count),
    )


def _pad_experts(batch: PackedTokens, rows: Tensor, padding: int) -> Tensor | None:
    """Place the tokens' experts at `rows` of a longer batch; in the `padding` rows routers choose
    themselves."""
    experts = batch.routed_experts
    if experts is None:
        return None
    padded = experts.new_full((len(experts) + padding, experts.shape[1]), OWN_CHOICE)
    padded[rows.to(experts.device)] = experts
    return padded


def _zigzag(batch: PackedTokens, ranks: int, rank: int, multiple: int) -> LocalTokens:
    plan = _ZigzagPlan(batch.layout.query_lens, ranks, multiple)
    device = batch.tokens.device
    padded = plan.padded_rows.to(device)
    tokens = batch.tokens.new_full((plan.num_tokens,), FILLER_TOKEN)
    tokens[padded] = batch.tokens
    positions = batch.positions.new_zeros(plan.num_tokens)
    positions[padded] = batch.positions
    # Every rank scores the tokens whose rows it holds, padded to the largest rank's number; `order`
    # puts the gathered scores back into the order of the batch.
    mine = plan.rows_of(rank).to(device)
    owner, local_row = plan.owners()
    asked = plan.padded_rows[batch.rows.cpu()]
    held_by = [(owner[asked] == r).nonzero()[:, 0] for r in range(ranks)]
    most = max(map(len, held_by))
    order = torch.empty(len(asked), dtype=torch.int64)
    for r, held in enumerate(held_by):
        order[held] = r * most + torch.arange(len(held))
    held = held_by[rank].to(device)
    missing = most - len(held)
    experts = _pad_experts(batch, plan.padded_rows, plan.num_tokens - len(batch.tokens))
    return LocalTokens(
        tokens=tokens[mine][None],
        positions=positions[mine][None],
        layouts=plan.layouts(rank, device),
        asked=AskedTokens(
            rows=F.pad(local_row[asked].to(device)[held], (0, missing)),
            targets=F.pad(batch.targets[held], (0, missing)),
            temperature=F.pad(batch.temperature[held], (0, missing), value=1.0),
            kept=batch.kept and batch.kept.at(held, missing),
            draws=batch.draws and batch.draws.at(held, missing),
            wants_hidden=batch.wants_hidden,
            wants_squares=batch.wants_squares,
            likeliest=batch.likeliest and batch.likeliest.at(held, missing),
            teacher=batch.teacher and batch.teacher.at(F.pad(held, (0, missing))),
        ),
        order=order.to(device),
        routed_experts=None if experts is None else experts[mine],
    )


class _ZigzagPlan:
    """A plan of which rank of a context-parallel group holds which token of padded sequences."""

    def __init__(self, lens: Sequence[int], ranks: int, multiple: int):
        self.ranks = ranks
        chunks = 2 * ranks
        self.chunk_lens = [-(-n // chunks) for n in lens]
        if filler := -2 * sum(self.chunk_lens) % multiple:
            self.chunk_lens.append(filler // 2)
        sizes = torch.tensor(self.chunk_lens) * chunks
        self.starts = sizes.cumsum(0) - sizes
        self.num_tokens = int(sizes.sum())
        offsets = [start + torch.arange(n) for start, n in zip(self.starts, lens, strict=False)]
        self.padded_rows = torch.cat(offsets)
        """Index of each unpadded token among the padded ones, int64."""

    def rows_of(self, rank: int) -> Tensor:
        """Return a rank's padded tokens in the order in which it computes them, int64."""
        return torch.cat(
            [
                start + chunk * n + torch.arange(n)
                for chunk in (rank, 2 * self.ranks - 1 - rank)
                for start, n in zip(self.starts, self.chunk_lens, strict=True)
            ]
        )

    def owners(self) -> tuple[Tensor, Tensor]:
        """Return the rank that holds each padded token, and its row on that rank."""
        owner = torch.empty(self.num_tokens, dtype=torch.int64)
        row = torch.empty(self.num_tokens, dtype=torch.int64)
        for rank in range(self.ranks):
            rows = self.rows_of(rank)
            owner[rows], row[rows] = rank, torch.arange(len(rows))
        return owner, row

    def layouts(self, rank: int, device: torch.device) -> tuple[AttentionLayout, AttentionLayout]:
        """Return the layouts of a rank's first and second chunks, over the gathered keys of all
        ranks."""
        owner, row = self.owners()
        # Gathered keys are in rank order; map positions of padded sequences to rows among them.
        stored = owner * (self.num_tokens // self.ranks) + row
        longest = 2 * self.ranks * max(self.chunk_lens)
        rows = (self.starts[:, None] + torch.arange(longest)).clamp_(max=self.num_tokens - 1)
        key_rows = stored[rows].to(device)
        first, second = (
            AttentionLayout(
                query_lens=tuple(self.chunk_lens),
                key_lens=tuple((chunk + 1) * n for n in self.chunk_lens),
                key_rows=key_rows,
            )
            for chunk in (rank, 2 * self.ranks - 1 - rank)
        )
        return first, second
