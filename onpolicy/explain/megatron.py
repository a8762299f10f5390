"""Recording of Megatron's modules under the names of Hugging Face's.

Megatron makes queries, keys and values by one product, and gate and up by one. The rows of a fused
weight (`weight_map.py`) give the columns of its result. A pipeline stage records its own layers, by
their numbers in the model; tensors sharded over other ranks are gathered (`together.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onpolicy.explain.taps.policy import experts_scope, packed_keys, watched
from onpolicy.explain.taps.recorder import Call, Recorder
from onpolicy.explain.taps.scope import Scope
from onpolicy.explain.together import (
    ADDED,
    OverTensorRanks,
    axes_of,
    experts_together,
    makes_own_tokens,
)
from onpolicy.train.megatron.adapters import PartLowRank
from onpolicy.train.megatron.batch import LocalTokens
from onpolicy.train.megatron.collectives import gather_rows
from onpolicy.train.megatron.layout import MegatronLayout
from onpolicy.train.megatron.model import PolicyGptModel
from onpolicy.train.megatron.moe import AlignedExperts
from onpolicy.train.megatron.weight_map import WeightMap
from onpolicy.train.megatron.weights import first_layer, global_name

WITHOUT_WEIGHTS = {
    "self_attention.core_attention": "self_attn",
    "mlp": "mlp",
    "mlp.experts": "mlp.experts",
    "mlp.shared_expert": "mlp.{shared_expert}",
}
"""Modules of a layer that call operators and hold no `weight`, with their Hugging Face names."""


def tensor_rank() -> int:
    """Return this rank's number among the ranks that share every linear."""
    rank: int = parallel_state.get_tensor_model_parallel_rank()
    return rank


def passes_of(model: nn.Module, recorder: Recorder) -> AbstractContextManager[list[list[Call]]]:
    """Apply `watched` to a trainer's model with tapped operators."""
    policy: PolicyGptModel = unwrap_model(model)

    def rows_of(_: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        local = kwargs["packed_seq_params"]
        return _keys(local, policy.cp_group), local.rows

    assert policy.config.hf_config is not None
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
    assert policy.config.hf_config is not None
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
