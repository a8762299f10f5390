"""A Hugging Face model without weights, for inspection or to be filled; and its decoder layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from onpolicy.errors import ConfigError, in_one_line
from onpolicy.models.llama4 import use_usual_form


def empty_causal_lm(
    config: PretrainedConfig, trust_remote_code: bool, **settings: Any
) -> PreTrainedModel:
    """Return the model with parameters on the meta device and buffers in place; keep `config` as it is.

    The model is float32, whatever dtype is published: another dtype would round buffers (Gemma's
    embedding scale).

    Raise ConfigError if the configuration does not describe a causal language model.
    """
    try:
        with parameters_without_memory(), no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                trust_remote_code=trust_remote_code,
                **{"dtype": torch.float32, **settings},
            )
        use_usual_form(model)
        initialize_buffers(model)
        hand_on_keywords(model)
        return model
    except Exception as error:  # a model's own code may raise anything
        raise ConfigError(
            f"model_type={config.model_type}: transformers cannot build a causal language model from "
            f"its config.json ({in_one_line(error)}). Choose another checkpoint, or download it again."
        ) from error


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Move every parameter to the meta device when a module registers it.

    Buffers stay where they are made, since a checkpoint does not store them.
    """
    take = nn.Module.register_parameter

    def take_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            empty = type(parameter)(parameter.to("meta"), requires_grad=parameter.requires_grad)
            empty.__dict__.update(parameter.__dict__)
            parameter = empty
        take(module, name, parameter)

    nn.Module.register_parameter = take_empty  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = take  # type: ignore[method-assign]


def initialize_buffers(model: PreTrainedModel) -> None:
    """Initialise buffers as transformers does for a checkpoint with all parameters and no buffers.

    Parameters are skipped: on the meta device their random numbers are never stored, but drawing
    them takes most of the time.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()


def give_memory(module: nn.Module, device: torch.device, buffers: Mapping[str, Tensor]) -> None:
    """Give a module's parameters memory on a device, not initialised, and copies of `buffers`, by name,
    in their own dtype."""
    module.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = buffer.to(device)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a causal LM, or of its decoder."""
    count = model.config.num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return next(m for m in lists if len(m) == count)


DROPPING = {"NemotronDecoderLayer"}
"""Classes of layers that accept keywords and pass none on to `self_attn` (transformers 5.12 to
5.19)."""


def hand_on_keywords(model: nn.Module) -> None:
    """Make layers that drop keywords pass on to `self_attn` those that it is not given already.

    Both engines pass the layout to attention by keyword.
    """
    for layer in model.modules():
        if type(layer).__name__ in DROPPING:
            _hand_on(layer)


def _hand_on(layer: Any) -> None:
    given: dict[str, Any] = {}

    def remember(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given.clear()
        given.update(kwargs)

    def add(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**given, **kwargs}

    layer.register_forward_pre_hook(remember, with_kwargs=True)
    layer.self_attn.register_forward_pre_hook(add, with_kwargs=True)
