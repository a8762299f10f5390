"""The trainer's model: a Hugging Face causal LM that returns log-probabilities of requested tokens.

They are computed from hidden states, without all logits at once. A critic is such a model with one
value per token in the place of its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from onpolicy.contract import AdapterShape
from onpolicy.images.placed import PlacedImage
from onpolicy.models.align import align_modules, replace_operators
from onpolicy.models.attention_function import ATTENTION_NAME
from onpolicy.models.delta_net import delta_nets, recurrence_of
from onpolicy.models.empty import decoder_layers, empty_causal_lm
from onpolicy.models.expert_layers import OWN_CHOICE, RoutingReplay, replay_routing
from onpolicy.models.logits import LogitsRule, logits_rule
from onpolicy.models.lora.adapters import add_adapters, factors_of
from onpolicy.models.vision.image_attention import BlockAttention
from onpolicy.models.vision.seeing import SequencePart, add_sight, sight_of
from onpolicy.ops import AttentionLayout, Operators, ScoreRule
from onpolicy.ops.draws import Draws
from onpolicy.ops.kept_tokens import WHOLE, Cut, KeptTokens
from onpolicy.ops.likeliest_tokens import LikeliestTokens, likeliest_log_probs
from onpolicy.ops.log_probs import Head, Scores, VocabParallel, square_sums, token_log_probs
from onpolicy.ops.reverse_kl import TeacherRows, reverse_kl
from onpolicy.ops.row_parallel import RowParallel
from onpolicy.ops.shared_rows import SharedRows


class PolicyModel(nn.Module):
    """A causal LM whose forward pass returns log-probabilities, never logits."""

    causal_lm: PreTrainedModel

    def __init__(self, causal_lm: PreTrainedModel, operators: Operators):
        super().__init__()
        self.causal_lm, self.operators = causal_lm, operators
        # True-on-policy runs refuse a model without a known rule (`models/hf_config.py`).
        self.logits_rule = logits_rule(causal_lm) or LogitsRule()
        self.is_recurrent = bool(delta_nets(causal_lm))
        self.replay: RoutingReplay | None = None
        """The routing replay of the last forward pass."""

    def use(self, operators: Operators) -> None:
        """Replace the operators."""
        replace_operators(self, operators)

    @contextmanager
    def around_operators(self, around: Callable[[Operators], Operators]) -> Iterator[None]:
        """Wrap the operators of every module with `around` inside the context."""
        with ExitStack() as stack:
            for module in self.modules():
                if (own := getattr(module, "operators", None)) is not None:
                    stack.callback(setattr, module, "operators", own)
                    module.operators = around(own)  # type: ignore[assignment]
            yield

    @property
    def layers(self) -> nn.ModuleList:
        """Return the decoder layers."""
        return decoder_layers(self.causal_lm)

    def forward(self, batch: PackedTokens) -> AnyScores:
        """Score the requested tokens."""
        return score_rows(self.hidden_states(batch), self.head(), batch)

    def head(self) -> Head:
        """Return the output projection with its current weights."""
        own = self.causal_lm.get_output_embeddings()
        finish = partial(self.logits_rule.apply, self.operators)
        vocabulary = VocabParallel(own.weight.shape[0])
        return Head(self.operators, own.weight, own.bias, vocabulary, finish, factors_of(own))

    def hidden_states(self, batch: PackedTokens) -> Tensor:
        """Return [R, H]: the head's input for each requested token, from the position before it."""
        inputs, images = self._inputs(batch)

        def attention(q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule) -> Tensor:
            out = self.operators.attention(q, k, v, batch.layout, scores)
            return images.correct(self.operators, out, q, k, v, scores) if images else out

        recurrent = {"recurrence": recurrence_of(batch.layout)} if self.is_recurrent else {}
        self.replay = routing_replay(batch, self.causal_lm.config)
        # It stays until the next forward pass, since a backward pass may recompute activations.
        replay_routing(self.causal_lm, self.replay)
        hidden = self.causal_lm.base_model(
            position_ids=batch.positions[None],
            use_cache=False,
            attention_function=attention,
            **inputs,
            **recurrent,
        )[0][0]
        return rows_asked(hidden, batch)

    def _inputs(self, batch: PackedTokens) -> tuple[dict[str, Tensor], BlockAttention | None]:
        """Return the decoder's inputs, and the attention of images whose tokens see each other."""
        sight = sight_of(self.causal_lm.base_model)
        if sight is None:
            return {"input_ids": batch.tokens[None]}, None
        lens = batch.layout.query_lens
        images = batch.images or [()] * len(lens)
        parts = [SequencePart(0, n, seen) for n, seen in zip(lens, images, strict=True)]
        embedded = sight.embed(batch.tokens, parts)
        starts = [0, *accumulate(lens)]
        attention = sight.attention(lambda part, low, high: starts[part] + torch.arange(low, high))
        return {"inputs_embeds": embedded}, attention


def routing_replay(batch: PackedTokens, config: PretrainedConfig) -> RoutingReplay | None:
    """Return the routing that the routers follow in this micro-batch, if any."""
    if batch.routed_experts is None:
        return None
    return RoutingReplay(batch.routed_experts, config.num_experts_per_tok)


def empty_policy(
    config: PretrainedConfig,
    operators: Operators,
    trust_remote_code: bool = False,
    row_parallel_blocks: int = 1,
    kind: type[PolicyModel] = PolicyModel,
    adapter: AdapterShape | None = None,
    tower_of: str | None = None,
) -> PolicyModel:
    """Build the model with parameters on the meta device, buffers, aligned operators and adapters, and
    with the vision tower of the checkpoint `tower_of`, if one is named."""
    causal_lm = empty_causal_lm(config, trust_remote_code, attn_implementation=ATTENTION_NAME)
    causal_lm.tie_weights()
    causal_lm.eval()  # no dropout: the rollout has none
    align_modules(causal_lm, operators, RowParallel(row_parallel_blocks))
    if tower_of is not None:
        add_sight(causal_lm, tower_of, operators)
    add_adapters(causal_lm, operators, adapter)
    return kind(causal_lm, operators)


class ValueModel(PolicyModel):
    """A causal LM without its output projection that returns values."""

    def __init__(self, causal_lm: PreTrainedModel, operators: Operators):
        super().__init__(causal_lm, operators)
        head = causal_lm.get_output_embeddings()
        name = next(name for name, child in causal_lm.named_children() if child is head)
        setattr(causal_lm, name, nn.Identity())
        self.value_head = ValueHead(head.weight.shape[1])

    def forward(self, batch: PackedTokens) -> Values:  # type: ignore[override]
        """Compute the value of each requested token, at the position that predicts it."""
        return Values(self.value_head.values(self.operators, self.hidden_states(batch)))


class ValueHead(nn.Linear):
    """A value head, [..., H] -> float32 [...], by an operator that does not round the result.

    It starts at zero: the first advantages are the plain returns, and it draws no random numbers.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype | None = None):
        super().__init__(hidden_size, 1, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set weight and bias to zero, and draw nothing from torch's generator."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def values(self, operators: Operators, hidden: Tensor) -> Tensor:
        """Compute float32 [R] from hidden states [R, H]."""
        return operators.partial_linear(hidden, self.weight)[:, 0] + self.bias.float()


class Values(NamedTuple):
    """The values of the requested tokens, from a critic's forward pass."""

    values: Tensor
    """float32 [R]: expected return of each token and all after it, given the tokens before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTokens:
    """The R requested tokens of a micro-batch, whose log-probabilities are computed."""

    rows: Tensor
    """int64 [R]: rows of the micro-batch whose *next* token is requested"""

    shared_rows: SharedRows | None = None
    """Readings of `rows`, where several sequences may request one row"""

    targets: Tensor
    """int64 [R]: the requested tokens"""

    temperature: Tensor
    """float32 [R]: the divisor of each row's logits"""

    kept: KeptTokens | None = None
    """The sets that the R tokens were drawn from; None: the whole vocabulary for all"""

    draws: Draws | None = None
    """The seeds of the R tokens, and which of them to draw again; None: none"""

    wants_hidden: bool = False
    """Whether `HiddenScores` are requested"""

    wants_squares: bool = False
    """Whether `SquaredScores` are requested"""

    teacher: TeacherRows | None = None
    """The teacher's distributions at the R tokens; if given, `TaughtScores` are computed"""

    likeliest: LikeliestTokens | None = None
    """The engine's likeliest tokens at the R tokens; if given, `LikeliestScores` are computed"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens(AskedTokens):
    """Whole sequences laid end to end, of T tokens, and the requested ones."""

    tokens: Tensor
    """int64 [T]"""

    positions: Tensor
    """int64 [T]: 0, 1, ... within each sequence"""

    layout: AttentionLayout

    images: Sequence[Sequence[PlacedImage]] = ()
    """Images of each sequence; empty: of none"""

    routed_experts: Tensor | None = None
    """int64 [T, layers x k]: experts to use in place of the routers' choice; -1: not known"""

    @staticmethod
    def pack(
        sequences: Sequence[Sequence[int]],
        asked: Sequence[Sequence[bool]],
        temperatures: Sequence[Sequence[float]],
        routed_experts: Sequence[NDArray[np.int32] | None] = (),
        kept_tokens: Sequence[Sequence[bytes]] = (),
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> PackedTokens:
        """Pack sequences of token ids on the CPU, each with a mask of the requested tokens.

        The first token of a sequence cannot be requested, since nothing comes before it.
        temperatures: per sequence, one for each requested token.
        routed_experts: per sequence, for all tokens but the last; see `Completion`, also for
        `kept_tokens`.
        """
        lens = tuple(len(s) for s in sequences)
        tokens = _tensor(sequences, "<i8")
        positions = torch.cat([torch.arange(n) for n in lens])
        rows = _tensor(asked, "?").nonzero()[:, 0] - 1
        return PackedTokens(
            tokens=tokens,
            positions=positions,
            layout=AttentionLayout.packed(lens),
            rows=rows,
            targets=tokens[rows + 1],
            temperature=_tensor(temperatures, "<f4"),
            routed_experts=_pack_experts(lens, routed_experts),
            kept=_pack_kept([len(each) for each in temperatures], kept_tokens),
            images=images,
        )

    @staticmethod
    def after_prompts(
        sequences: Sequence[Sequence[int]],
        prompt_lens: Sequence[int],
        temperature: float,
        routed_experts: Sequence[NDArray[np.int32] | None] = (),
        kept_tokens: Sequence[Sequence[bytes]] = (),
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> PackedTokens:
        """Pack sequences in which every token after the prompt is requested."""
        asked = [
            [i >= prompt for i in range(len(sequence))]
            for sequence, prompt in zip(sequences, prompt_lens, strict=True)
        ]
        temperatures = [[temperature] * sum(mask) for mask in asked]
        held = routed_experts, kept_tokens, images
        return PackedTokens.pack(sequences, asked, temperatures, *held)

    def on(self, device: torch.device | str) -> PackedTokens:
        """Return the same on a device, so that no part needs to be read back from it."""
        moved: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            if isinstance(part := getattr(self, name), Tensor):
                moved[name] = part.to(device)
            elif isinstance(part, (AttentionLayout, SharedRows, Draws)):
                moved[name] = part.on(device)
        return replace(self, **moved)

    def with_own_cut(
        self,
        cut: Cut | None,
        compared: Tensor | None = None,
        allowed: Sequence[bytes] = (),
        *,
        always: bool = False,
    ) -> PackedTokens:
        """Return the same tokens with a check that each was drawn from the cut logits.

        compared: bool [R]: the tokens to check; all by default.
        allowed: [R]: the sets that grammars allowed, to which the cut is applied.
        always: count tokens without a recorded set as drawn from the whole vocabulary; otherwise a
        batch without any sets is not checked.
        """
        kept = self.kept
        if kept is None and (allowed or always):
            kept = KeptTokens((WHOLE,) * len(self.rows))
        if kept is None or (cut is None and not allowed):
            return self
        if compared is None:
            compared = torch.ones(len(self.rows), dtype=torch.bool)
        kept = replace(kept, cut=cut, allowed=tuple(allowed), compared=compared)
        return replace(self, kept=kept)

    def with_own_routing(self) -> PackedTokens:
        """Return the same tokens without given experts, so that the routers choose."""
        return replace(self, routed_experts=None)


def _tensor(parts: Sequence[Sequence[float]], dtype: str) -> Tensor:
    """Return numbers of sequences laid end to end."""
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype) for part in parts]))


def _pack_kept(counts: Sequence[int], kept_tokens: Sequence[Sequence[bytes]]) -> KeptTokens | None:
    """Pack the kept sets of sequences; counts: the number of requested tokens of each."""
    if not any(kept_tokens):
        return None
    parts = zip(counts, kept_tokens, strict=True)
    return KeptTokens(tuple(x for count, known in parts for x in known or [WHOLE] * count))


def _pack_experts(
    lens: Sequence[int], routed_experts: Sequence[NDArray[np.int32] | None]
) -> Tensor | None:
    # The experts of each sequence's last token are not known: its row keeps OWN_CHOICE.
    width = next((x.shape[1] for x in routed_experts if x is not None), None)
    if width is None:
        return None
    packed = torch.full((sum(lens), width), OWN_CHOICE)
    for part, known in zip(packed.split(list(lens)), routed_experts, strict=True):
        if known is not None:
            part[:-1] = torch.from_numpy(known.copy())
    return packed


def rows_asked(hidden: Tensor, asked: AskedTokens) -> Tensor:
    """Return the head's input for each requested token, from the row before it: [T, H] -> [R, H]."""
    if asked.shared_rows is not None:
        return asked.shared_rows.take(hidden)
    return hidden[asked.rows]


def score_rows(hidden: Tensor, head: Head, asked: AskedTokens) -> AnyScores:
    """Compute the requested scores of hidden states [R, H] under a head."""
    scores = token_log_probs(
        head, hidden, asked.targets, asked.temperature, asked.kept, asked.draws
    )
    if asked.wants_hidden:
        return HiddenScores(*scores, hidden.detach())
    if asked.wants_squares:
        return SquaredScores(*scores, square_sums(hidden, head, asked.temperature, asked.kept))
    if asked.teacher is not None:
        return TaughtScores(*scores, reverse_kl(hidden, head, asked.teacher))
    if asked.likeliest is not None:
        asked_of = asked.likeliest.tokens, asked.temperature, asked.kept
        return LikeliestScores(*scores, likeliest_log_probs(hidden, head, *asked_of))
    return scores


class HiddenScores(NamedTuple):
    """Scores, and the hidden states that they were computed from."""

    log_probs: Tensor
    entropy: Tensor
    drawn: Tensor
    row_digests: Tensor

    hidden: Tensor
    """[R, H]: the head's input for each token, without gradient"""


class TaughtScores(NamedTuple):
    """Scores, and the divergence of each token's distribution from the teacher's."""

    log_probs: Tensor
    entropy: Tensor
    drawn: Tensor
    row_digests: Tensor

    reverse_kl: Tensor
    """float32 [R], in nats, with gradient"""


class LikeliestScores(NamedTuple):
    """Scores, and the log-probabilities of the engine's likeliest tokens."""

    log_probs: Tensor
    entropy: Tensor
    drawn: Tensor
    row_digests: Tensor

    likeliest_log_probs: Tensor
    """float32 [R, k], with gradient"""


class SquaredScores(NamedTuple):
    """Scores, and the sum of the squared probabilities of all tokens."""

    log_probs: Tensor
    entropy: Tensor
    drawn: Tensor
    row_digests: Tensor

    squares: Tensor
    """float32 [R], without gradient"""


AnyScores = Scores | HiddenScores | SquaredScores | TaughtScores | LikeliestScores
