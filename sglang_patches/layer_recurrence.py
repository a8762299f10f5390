"""States of recurrent layers (gated delta networks) in SGLang's slots, one for each request.

Diverges in stock SGLang: its own models compute these layers by kernels whose chunks begin wherever
a prefill does, and a decoded token by others, so that bits depend on how a prompt was cut; its
transformers backend keeps no states. Here the trainer's module computes them
(onpolicy/models/delta_net.py), and SGLang is told that the model has states of the operators' shapes:
float32 blocks, and the last inputs of the convolutions. Its pool allocates, copies and frees them
with the requests. Its prefix cache holds copies beside the keys, at the end of each prefill and of
each request (its strategy `no_buffer`), so that the next turn of an episode goes on from the last. A
request whose prefix ends elsewhere goes on from the last copy before, and samples of one prompt
each compute it.

A pass of SGLang's says how many tokens of a request its state holds. One that holds none begins from
zeros, whatever another request left in the slot.

The layout is made on the host for every pass, so no CUDA graph can hold it.

Source: get_linear_attn_config, sglang/srt/configs/linear_attn_model_registry.py, a registry of classes
of configurations that describe their states themselves; attn_backend_wrapper,
sglang/srt/layers/attention/attention_registry.py, which puts SGLang's kernels for such layers beside
attention; _resolve_attention_backend_model_cls, sglang/srt/models/transformers.py, by which it refuses
models of which transformers does not say that their attention can be replaced, as it can. Can go
when its transformers backend keeps states.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from onpolicy.contract import NumericsContract
from onpolicy.models.delta_net import LayerStates, recurrent_layers
from onpolicy.ops.recurrence import RecurrentLayout, state_shapes
from sglang_patches import registry
from sglang_patches.engine_graphs import require_no_graphs

CONFIG_TARGET = "sglang.srt.configs.linear_attn_model_registry.get_linear_attn_config"
BACKEND_TARGET = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
CLASS_TARGET = "sglang.srt.models.transformers._resolve_attention_backend_model_cls"
LOAD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def install(contract: NumericsContract) -> None:
    """Hook SGLang for a model with such layers, and for no other."""
    if not contract.shapes.delta:
        return

    def after_load(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
        require_no_graphs(runner, "the layout of recurrent layers, which is")
        give_states(runner)
        return result

    def describe(config: PretrainedConfig) -> tuple[Any, Any]:
        return states_of(config, contract)

    registry.hook(CONFIG_TARGET, describe, "replace")
    registry.hook(BACKEND_TARGET, lambda runner, backend: backend, "replace")
    registry.hook(CLASS_TARGET, lambda config: None, "replace")
    registry.hook(LOAD_TARGET, after_load, "after")


def states_of(config: PretrainedConfig, contract: NumericsContract) -> tuple[Any, Any]:
    """Return SGLang's specification of a model, and of its states."""
    from sglang.srt.configs.linear_attn_model_registry import LinearAttnModelSpec
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType

    (sizes,) = contract.shapes.delta
    conv, delta = state_shapes(sizes)
    layers = recurrent_layers(config)
    shape: Any = SimpleNamespace(conv=[conv], temporal=delta)
    dtypes = Mamba2StateDType(conv=getattr(torch, contract.dtype), temporal=torch.float32)
    return LinearAttnModelSpec(type(config), backend_class_name=""), SimpleNamespace(
        mamba2_cache_params=Mamba2CacheParams(shape=shape, dtype=dtypes, layers=layers),
        full_attention_layer_ids=sorted({*range(config.num_hidden_layers)} - {*layers}),
    )


def give_states(runner: Any) -> None:
    """Have a loaded model's recurrent layers find their states before every pass."""

    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        pool, batch = runner.req_to_token_pool, kwargs["forward_batch"]
        layout = layout_of(batch, pool.get_mamba_indices(batch.req_pool_indices).long())

        def recurrence(layer: int) -> LayerStates:
            states = pool.mamba2_layer_cache(layer)
            return LayerStates(layout, states.conv[0], states.temporal)

        return args, {**kwargs, "recurrence": recurrence}

    runner.model.model.register_forward_pre_hook(before, with_kwargs=True)


def layout_of(batch: Any, slots: torch.Tensor) -> RecurrentLayout:
    """Return the layout of a pass of SGLang's: its new tokens, and those that the states hold."""
    if batch.forward_mode.is_decode_or_idle():
        lens = batch.seq_lens.tolist()
        return RecurrentLayout(
            query_lens=(1,) * len(lens), past_lens=tuple(n - 1 for n in lens), slots=slots
        )
    return RecurrentLayout(
        query_lens=tuple(batch.extend_seq_lens_cpu),
        past_lens=tuple(batch.extend_prefix_lens_cpu),
        slots=slots,
    )
