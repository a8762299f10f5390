"""Records what Megatron's modules compute, under the names of Hugging Face's (`onpolicy explain`).

Megatron makes queries, keys and values by one product, and gate and up by one. Where the rows of a fused
weight stand (`weight_map.py`) is where the columns of its result stand. A stage of a pipeline records
its own layers, by their numbers in the model; what other ranks share is put together (`together.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from onpolicy.taps.door import experts_scope, packed_keys, record_embedding, tapped
from onpolicy.taps.recorder import Call, Recorder
from onpolicy.taps.scope import Scope
from onpolicy.train.megatron.batch import LocalTokens
from onpolicy.train.megatron.collectives import gather_rows
from onpolicy.train.megatron.layout import MegatronLayout
from onpolicy.train.megatron.model import PolicyGptModel
from onpolicy.train.megatron.moe import AlignedExperts
from onpolicy.train.megatron.together import (
    COLUMNS,
    OverTensorRanks,
    axes_of,
    experts_together,
    makes_own_tokens,
)
from onpolicy.train.megatron.weight_map import WeightMap
from onpolicy.train.megatron.weights import first_layer, global_name

WITHOUT_WEIGHTS = {
    "self_attention.core_attention": "self_attn",
    "mlp": "mlp",
    "mlp.experts": "mlp.experts",
    "mlp.shared_expert": "mlp.{shared_expert}",
}
"""Modules of a layer that call operators and hold no `weight`, and what Hugging Face calls them."""


@contextmanager
def recording(model: nn.Module, recorder: Recorder) -> Iterator[list[list[Call]]]:
    """Record every forward pass of a trainer's model; yields what grows by the calls of each."""
    policy: PolicyGptModel = unwrap_model(model)
    passes: list[list[Call]] = []

    shares = _Shares(policy)

    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        local = kwargs["packed_seq_params"]
        recorder.open(_keys(local, policy.cp_group), local.rows)

    with ExitStack() as stack:
        own = policy.config.operators
        assert own is not None and policy.config.hf_config is not None
        stack.callback(setattr, policy.config, "operators", own)
        policy.config.operators = tapped(own, recorder)
        vocabulary = policy.config.hf_config.vocab_size
        recorder.at_head = OverTensorRanks(COLUMNS, policy.tp_group, columns=vocabulary)
        hooks = [
            policy.register_forward_pre_hook(begin, with_kwargs=True),
            policy.register_forward_hook(lambda *_: passes.append(recorder.close())),
            *_embedding_hooks(policy, recorder, shares),
            *_scope_hooks(policy, recorder, shares),
        ]
        for hook in hooks:
            stack.callback(hook.remove)
        yield passes


def _keys(local: LocalTokens, group: dist.ProcessGroup) -> Tensor:
    """int64 [T]: of the rows of this rank, whose prefixes are on all ranks of the group."""
    tokens = gather_rows(local.tokens[0], group)
    return torch.cat([packed_keys(tokens, layout) for layout in local.layouts])


class _Shares:
    """How the modules of a model are shared."""

    def __init__(self, policy: PolicyGptModel):
        self.config, self.group = policy.config, policy.tp_group

    def of(self, name: str, module: nn.Module) -> OverTensorRanks:
        axes = axes_of(name, module)
        shares_tokens = self.config.sequence_parallel and makes_own_tokens(axes)
        return OverTensorRanks(axes, self.group, shares_tokens)

    def scope(
        self, name: str, module: nn.Module, names: Mapping[str, Tensor | None], args: Any
    ) -> Scope:
        """The scope of a module that computes those of these names, given `args`."""
        first, axes = next(iter(names)), axes_of(name, module)
        if isinstance(module, AlignedExperts):
            scope = experts_scope(first, args[2], module.row_parallel, has_halves=True)
            scope.together = experts_together(module, axes, args[2])
            return scope
        chunks = 2 if self.config.context_parallel_size > 1 else 1
        return Scope(module=first, fused=names, chunks=chunks, together=self.of(name, module))


def _embedding_hooks(policy: PolicyGptModel, recorder: Recorder, shares: _Shares) -> Iterator[Any]:
    def record(module: nn.Module, args: Any, out: Tensor) -> None:
        whole = shares.of("embedding", module).made("embedding", out)
        record_embedding(recorder)(module, args, whole)

    if policy.pre_process:
        yield policy.embedding.register_forward_hook(record)


def _scope_hooks(policy: PolicyGptModel, recorder: Recorder, shares: _Shares) -> Iterator[Any]:
    names = _hugging_face_names(policy)
    for name, module in policy.named_modules():
        if name in names:
            yield module.register_forward_pre_hook(_enter(name, names[name], recorder, shares))
            yield module.register_forward_hook(lambda *_: recorder.leave(), always_call=True)


def _enter(
    name: str, names: Mapping[str, Tensor | None], recorder: Recorder, shares: _Shares
) -> Callable[[nn.Module, Any], None]:
    def enter(module: nn.Module, args: Any) -> None:
        if recorder.is_open:
            recorder.enter(shares.scope(name, module, names, args))

    return enter


def _hugging_face_names(policy: PolicyGptModel) -> dict[str, dict[str, Tensor | None]]:
    """What each of Megatron's modules computes, by Hugging Face's names, and int64 the columns of
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
        if kind == "weight":
            found[module] = _columns(weights, global_name(parameter, first))
    return found


def _columns(weights: WeightMap, parameter: str) -> dict[str, Tensor | None]:
    rows: dict[str, list[Tensor]] = {}
    for part in weights.parts(parameter, 0, 0):
        name = part.name.removeprefix("model.").removesuffix(".weight")
        name = name.replace(f".{weights.family.sparse_name}.", ".mlp.")
        block = part.target[0] if part.target else slice(0, 0)
        assert isinstance(block, slice)
        rows.setdefault(name, []).append(torch.arange(block.start, block.stop))
    is_fused = len(rows) > 1
    return {name: torch.cat(blocks) if is_fused else None for name, blocks in rows.items()}
