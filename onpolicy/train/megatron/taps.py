"""Records what Megatron's modules compute, under the names of Hugging Face's (`onpolicy explain`).

Megatron makes queries, keys and values by one product, and gate and up by one. Where the rows of a fused
weight stand (`weight_map.py`) is where the columns of its result stand. A stage of a pipeline records
its own layers, by their numbers in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from onpolicy.taps.door import experts_scope, packed_keys, record_embedding, tapped
from onpolicy.taps.recorder import Call, Recorder, Scope
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
"""Modules of a layer that call operators and hold no `weight`, and what Hugging Face calls them."""


@contextmanager
def recording(model: nn.Module, recorder: Recorder) -> Iterator[list[list[Call]]]:
    """Record every forward pass of a trainer's model; yields what grows by the calls of each."""
    policy: PolicyGptModel = unwrap_model(model)
    passes: list[list[Call]] = []

    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        local = kwargs["packed_seq_params"]
        recorder.open(packed_keys(local.tokens[0], local.layouts[0]), local.rows)

    with ExitStack() as stack:
        own = policy.config.operators
        assert own is not None
        stack.callback(setattr, policy.config, "operators", own)
        policy.config.operators = tapped(own, recorder)
        hooks = [
            policy.register_forward_pre_hook(begin, with_kwargs=True),
            policy.register_forward_hook(lambda *_: passes.append(recorder.close())),
            *_embedding_hooks(policy, recorder),
            *_scope_hooks(policy, recorder),
        ]
        for hook in hooks:
            stack.callback(hook.remove)
        yield passes


def _embedding_hooks(policy: PolicyGptModel, recorder: Recorder) -> Iterator[Any]:
    if policy.pre_process:
        yield policy.embedding.register_forward_hook(record_embedding(recorder))


def _scope_hooks(policy: PolicyGptModel, recorder: Recorder) -> Iterator[Any]:
    names = _hugging_face_names(policy)
    for name, module in policy.named_modules():
        if name in names:
            yield module.register_forward_pre_hook(_enter(names[name], recorder))
            yield module.register_forward_hook(lambda *_: recorder.leave(), always_call=True)


def _enter(
    names: Mapping[str, Tensor | None], recorder: Recorder
) -> Callable[[nn.Module, Any], None]:
    def enter(module: nn.Module, args: Any) -> None:
        scope = Scope(module=next(iter(names)), fused=names)
        if isinstance(module, AlignedExperts):
            scope = experts_scope(scope.module, args[2], module.row_parallel, has_halves=True)
        recorder.enter(scope)

    return enter


def _hugging_face_names(policy: PolicyGptModel) -> dict[str, dict[str, Tensor | None]]:
    """By the names of Megatron's modules: those that each computes, and int64 their columns."""
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
