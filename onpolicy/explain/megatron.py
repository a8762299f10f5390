"""Recorder of a Megatron trainer's modules under Hugging Face's names, as if one rank had run them.

Megatron makes queries, keys and values by one product, and gate and up by one. The rows of a fused
weight (`weight_map.py`) give the columns of its result. A pipeline stage records its own layers, by
their numbers in the model.

A call's tensors are gathered over the other ranks. Tensor parallelism shards columns, heads and,
between linears, tokens; expert parallelism shards the rows of experts, which return to the rank of
their token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onpolicy.explain.taps.attachment import experts_scope, packed_keys, watched
from onpolicy.explain.taps.evidence import ATTENTION, Scope, Together
from onpolicy.explain.taps.recorder import INPUTS, Call, Recorder
from onpolicy.ops.row_parallel import WHOLE, RowParallel
from onpolicy.training.megatron.collectives import gather_rows
from onpolicy.training.megatron.gpt_model import PolicyGptModel
from onpolicy.training.megatron.megatron_adapters import PartLowRank
from onpolicy.training.megatron.megatron_batch import LocalTokens
from onpolicy.training.megatron.megatron_weights import first_layer, global_name
from onpolicy.training.megatron.modules import (
    AlignedAttention,
    AlignedColumnLinear,
    AlignedMLP,
    AlignedRowLinear,
    JoinedHeadsNorm,
)
from onpolicy.training.megatron.moe import AlignedExperts, Exchange
from onpolicy.training.megatron.rank_layout import MegatronLayout
from onpolicy.training.megatron.weight_map import WeightMap

WITHOUT_WEIGHTS = {
    "self_attention.core_attention": "self_attn",
    "mlp": "mlp",
    "mlp.experts": "mlp.experts",
    "mlp.shared_expert": "mlp.{shared_expert}",
}
"""Modules of a layer that call operators and hold no `weight`, with their Hugging Face names."""


def passes_of(model: nn.Module, recorder: Recorder) -> AbstractContextManager[list[list[Call]]]:
    """Apply `watched` to a trainer's model with tapped operators."""
    policy: PolicyGptModel = unwrap_model(model)

    def rows_of(_: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        local = kwargs["packed_seq_params"]
        return _keys(local, policy.cp_group), local.asked.rows

    vocabulary = policy.config.hf_config.vocab_size
    recorder.at_head = OverTensorRanks(ADDED, policy.tp_group, columns=vocabulary)
    return watched(policy, recorder, rows_of, _hooks(policy, recorder))


def _keys(local: LocalTokens, group: dist.ProcessGroup) -> Tensor:
    """Return int64 [T], the keys of this rank's rows, whose prefixes are spread over the group's
    ranks."""
    tokens = gather_rows(local.tokens[0], group)
    return torch.cat([packed_keys(tokens, layout) for layout in local.layouts])


def _hooks(policy: PolicyGptModel, recorder: Recorder) -> Iterator[RemovableHandle]:
    def record(module: nn.Module, args: Any, out: Tensor) -> None:
        together = _together(policy, "embedding", module)
        recorder.add_embedding(module, args, together.made("embedding", out))

    if policy.pre_process:
        yield policy.embedding.register_forward_hook(record)
    names = _hugging_face_names(policy)
    for name, module in policy.named_modules():
        if name in names:
            yield from recorder.scoped(module, _scope_of(policy, name, module, names[name]))


def _together(policy: PolicyGptModel, name: str, module: nn.Module) -> OverTensorRanks:
    axes = axes_of(name, module)
    shares_tokens = policy.config.sequence_parallel and makes_own_tokens(axes)
    return OverTensorRanks(axes, policy.tp_group, shares_tokens)


def _scope_of(
    policy: PolicyGptModel, name: str, module: nn.Module, names: Mapping[str, Tensor | None]
) -> Callable[[Any, Any], Scope]:
    """Return a function that makes the scope of a module with these names."""
    first, chunks = next(iter(names)), 2 if policy.config.context_parallel_size > 1 else 1

    def scope(args: Any, kwargs: Any) -> Scope:
        if not isinstance(module, AlignedExperts):
            together = _together(policy, name, module)
            return Scope(module=first, fused=names, chunks=chunks, together=together)
        own = experts_scope(first, args[2], module.row_parallel, has_halves=True)
        own.together = experts_together(module, axes_of(name, module), args[2])
        return own

    return scope


def _hugging_face_names(policy: PolicyGptModel) -> dict[str, dict[str, Tensor | None]]:
    """Return the Hugging Face names of each Megatron module's results, with the columns (int64) of
    each."""
    shared, first = policy.config.family.shared_expert, first_layer(policy)
    found: dict[str, dict[str, Tensor | None]] = {
        f"decoder.layers.{layer}.{ours}": {
            f"layers.{first + layer}.{theirs.format(shared_expert=shared)}": None
        }
        for layer in range(len(policy.decoder.layers))
        for ours, theirs in WITHOUT_WEIGHTS.items()
    }
    weights = WeightMap(policy.config.hf_config, MegatronLayout())
    for parameter, _ in policy.named_parameters():
        module, _, kind = parameter.rpartition(".")
        if kind == "weight" or isinstance(policy.get_submodule(module), PartLowRank):
            found[module] = _columns(weights, global_name(parameter, first))
    return found


def _columns(weights: WeightMap, parameter: str) -> dict[str, Tensor | None]:
    rows: dict[str, list[Tensor]] = {}
    for part in weights.parts(parameter, 0, 0):
        name = part.name.removeprefix("model.").rpartition(".")[0]
        name = name.replace(f".{weights.family.sparse_name}.", ".mlp.")
        block = part.target[0] if part.target else slice(0, 0)
        assert isinstance(block, slice)
        rows.setdefault(name, []).append(torch.arange(block.start, block.stop))
    is_fused = len(rows) > 1
    return {name: torch.cat(blocks) if is_fused else None for name, blocks in rows.items()}


def tensor_rank() -> int:
    """Return this rank's number among the ranks that share every linear."""
    return int(parallel_state.get_tensor_model_parallel_rank())


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The axes along which an operator's tensors are sharded over tensor-parallel ranks; None: not
    sharded."""

    given: int | None = None
    made: int | None = None

    held: int | None = None
    """The axis of the operator's weight."""

    pieces: int = 1
    """Adjacent parts of its result and weight, each of which is sharded: gate and up."""


ALL = Axes()


class OverTensorRanks(Together):
    """A gatherer of the tensors of one module, or of the output projection, over tensor-parallel
    ranks."""

    def __init__(
        self,
        axes: Mapping[str, Axes],
        group: dist.ProcessGroup,
        shares_tokens: bool = False,
        columns: int | None = None,
    ):
        """Take the sharding. shares_tokens: whether unsharded tensors hold this rank's tokens
        alone; columns: the number of a result's columns without padding."""
        self.axes, self.group = axes, group
        self.shares_tokens, self.columns = shares_tokens, columns

    def given(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        with_rows = range(3) if name in ATTENTION else range(len(args))[INPUTS[name]]
        axis = self._of(name).given
        return tuple(
            self._whole(argument, axis) if number in with_rows else argument
            for number, argument in enumerate(args)
        )

    def made(self, name: str, out: Any) -> Any:
        if isinstance(out, tuple):
            return tuple(self.made(name, part) for part in out)
        axes = self._of(name)
        return self._whole(out, axes.made, axes.pieces)

    def held(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        axes = self._of(name)
        rows = [_alone(argument) for argument in args]
        if axes.held is None:
            return tuple(rows)
        for number in range(len(rows))[_WEIGHT if axes.held else _WITH_BIAS]:
            if rows[number] is not None:
                whole = self._together(rows[number], axes.held, axes.pieces)
                rows[number] = whole[: self.columns]
        return tuple(rows)

    def _of(self, name: str) -> Axes:
        return self.axes.get(name, ALL)

    def _whole(self, x: Tensor, axis: int | None, pieces: int = 1) -> Tensor:
        if axis is not None:
            return self._together(x, axis, pieces)[..., : self.columns]
        return gather_rows(x.detach(), self.group) if self.shares_tokens else x

    def _together(self, x: Tensor, axis: int, pieces: int) -> Tensor:
        parts = (part.movedim(axis, 0) for part in x.detach().chunk(pieces, axis))
        whole = torch.cat([gather_rows(part, self.group).movedim(0, axis) for part in parts], axis)
        if axis != _HEADS_FIRST:
            return whole.contiguous()
        # `by_row` finds tokens by these strides.
        return whole.transpose(-3, -2).contiguous().transpose(-3, -2)


class OverExpertRanks(OverTensorRanks):
    """A gatherer of experts over ranks: as if this rank had all experts, for its tokens alone."""

    def __init__(self, experts: AlignedExperts, axes: Mapping[str, Axes], chosen: Tensor):
        """Take `chosen`, int64 [T, k], the choices given to the module."""
        super().__init__(axes, experts.tensor_group)
        self.experts = experts.group
        self.count = len(experts.gate_up) * self.experts.size()
        self.chosen = chosen.reshape(-1).sort()[0]
        self.exchange = Exchange(chosen, len(experts.gate_up), self.experts)
        self.sorted = self.exchange.experts.sort(stable=True)[1]

    def _whole(self, x: Tensor, axis: int | None, pieces: int = 1) -> Tensor:
        x = super()._whole(x, axis, pieces)
        arrived = torch.empty_like(x)
        arrived[self.sorted] = x.detach()
        return self.exchange.back(arrived)

    def held(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        args = super().held(name, args)
        if name not in ("grouped_linear", "grouped_partial_linear"):
            return args
        rows, weight, _ = args
        numbers = torch.arange(self.count + 1, device=rows.device)
        offsets = torch.searchsorted(self.chosen, numbers)
        return rows, gather_rows(weight.detach(), self.experts), offsets


def experts_together(experts: AlignedExperts, axes: Mapping[str, Axes], chosen: Tensor) -> Together:
    """Return the gatherer for experts that get these choices."""
    if experts.group.size() == 1:
        return OverTensorRanks(axes, experts.tensor_group)
    return OverExpertRanks(experts, axes, chosen)


def _alone(argument: Any) -> Any:
    """Return an argument as it is where one rank has everything."""
    return RowParallel(argument.blocks) if isinstance(argument, RowParallel) else argument


_WEIGHT, _WITH_BIAS = slice(1, 2), slice(1, 3)

_HEADS_FIRST = -3
"""The axis of heads in [1, H, T, D]."""

COLUMNS = {"linear": Axes(made=-1, held=0)}
GATE_AND_UP = {"linear": Axes(made=-1, held=0, pieces=2)}
ADDED = {**COLUMNS, "add_scaled": Axes(given=-1, made=-1)}
"""The axes of an adapter's addition to columns, by the rows of B on each rank; all have the product
with A."""

HEADS = {"rms_norm": Axes(given=-2, made=-2)}
SUM = {"row_parallel_linear": Axes(given=-1, held=1)}
OF_MODULES: tuple[tuple[type[nn.Module], dict[str, Axes]], ...] = (
    (AlignedRowLinear, SUM),
    (JoinedHeadsNorm, {"rms_norm": ALL}),
    (AlignedMLP, {"gated": Axes(given=-1, made=-1)}),
    (
        AlignedAttention,
        {
            "rotary": Axes(given=_HEADS_FIRST, made=_HEADS_FIRST),
            "attention": Axes(given=-2, made=-2),
        },
    ),
    (
        AlignedExperts,
        {"grouped_linear": Axes(made=-1, held=1, pieces=2), "gated": Axes(given=-1, made=-1)},
    ),
)


def axes_of(name: str, module: nn.Module) -> Mapping[str, Axes]:
    """Return the axes along which a Megatron module's operators are sharded, by operator."""
    leaf = name.rpartition(".")[2]
    if isinstance(module, PartLowRank):
        whole = {} if module.row_parallel is WHOLE else SUM
        return whole if module.group is None else ADDED
    if isinstance(module, AlignedColumnLinear):
        return GATE_AND_UP if leaf == "linear_fc1" else COLUMNS
    if leaf in ("q_layernorm", "k_layernorm") and not isinstance(module, JoinedHeadsNorm):
        return HEADS
    return next((axes for kind, axes in OF_MODULES if isinstance(module, kind)), {})


def makes_own_tokens(axes: Mapping[str, Axes]) -> bool:
    """Return whether under sequence parallelism each rank computes some tokens: outside
    column-parallel linears, before which tokens are gathered, and in sums."""
    return not axes or axes is SUM
