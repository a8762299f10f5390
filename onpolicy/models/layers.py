"""The decoder layers of a Hugging Face model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from onpolicy.contract import OUTSIDE
from onpolicy.ops.base import Operators
from onpolicy.ops.partial import running_layer


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal LM, or of its decoder."""
    count = model.config.num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return next(m for m in lists if len(m) == count)


def layers_of_modules(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Every module, and its layer as `NumericsContract.layers` names it."""
    layers = dict.fromkeys(model.modules(), OUTSIDE)
    for number, layer in enumerate(decoder_layers(model)):
        layers.update(dict.fromkeys(layer.modules(), str(number)))
    return layers


def follow_layers(model: PreTrainedModel, operators: Operators) -> list[RemovableHandle]:
    """Tell operators that are aligned in some layers alone which one is running, until the handles are
    removed. Others are told nothing, and nothing is hooked."""
    return list(_follow(model, operators))


def _follow(model: PreTrainedModel, operators: Operators) -> Iterator[RemovableHandle]:
    if (running := running_layer(operators)) is None:
        return
    for number, layer in enumerate(decoder_layers(model)):
        yield layer.register_forward_pre_hook(lambda *_, name=str(number): running.enter(name))
        yield layer.register_forward_hook(lambda *_: running.enter(OUTSIDE), always_call=True)
