"""Facts about a model, found from its configuration alone and cached.

The model is built without weights and inspected, its norms are probed, and its own code runs for
one token on the meta device to show which attention its layers call. Several checks and the
contract need the results, and each takes time for a model of many layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from onpolicy.contract import AttentionShape
from onpolicy.errors import ConfigError, ContractError, in_one_line
from onpolicy.models.attention_function import ATTENTION_NAME
from onpolicy.models.delta_net import delta_nets
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.norms import NormKind, norm_kinds, norm_size
from onpolicy.models.rotary_factors import forget_scaling
from onpolicy.ops.layouts import ScoreRule

AttentionCall = tuple[Tensor, Tensor, Tensor, ScoreRule]
"""The arguments of a layer's call of an `AttentionFunction`."""


class ModelFacts:
    """A configuration, and facts about its model, each computed on first use."""

    def __init__(self, config: PretrainedConfig, trust_remote_code: bool = False):
        self.config, self.trust_remote_code = config, trust_remote_code
        self._called_with: dict[nn.Module, int] = {}

    @cached_property
    def model(self) -> PreTrainedModel:
        """Return the whole model on the meta device.

        Raise ConfigError if transformers cannot build it.
        """
        config = copy.deepcopy(self.config)
        forget_scaling(config)
        model = empty_causal_lm(config, self.trust_remote_code)
        model.config._attn_implementation = ATTENTION_NAME
        # An implementation whose shapes do not depend on the routers' choice.
        model.config._experts_implementation = "batched_mm"
        model.eval().to("meta")
        return model

    @cached_property
    def norms(self) -> dict[nn.Module, NormKind]:
        """Return the norms of the model whose kind is known."""
        return norm_kinds(self.model)

    def norm_sizes(self, *, centered: bool) -> tuple[int, ...]:
        """Return the distinct sizes of the layer norms (`centered`) or of the RMS norms.

        A norm without a weight has the size of the input that the model calls it with. It is left
        out where the model's code cannot run on the meta device, which no aligned run allows.
        """
        norms = [norm for norm, kind in self.norms.items() if kind.is_centered == centered]
        sizes = {norm: norm_size(norm) for norm in norms}
        if None in sizes.values():
            with suppress(ConfigError):
                _ = self.attention  # runs the decoder, unless that was done
        found = {size or self._called_with.get(norm) for norm, size in sizes.items()}
        return tuple(sorted(size for size in found if size is not None))

    @cached_property
    def attention(self) -> list[AttentionShape]:
        """Return the shapes of the attention that the model calls, layer after layer.

        Raise ConfigError if the model's code cannot run on the meta device, or calls attention that
        has no aligned operator.
        """
        model_type = f"model_type={self.model.config.model_type}"
        try:
            return [_shape(*call) for call in self.run_one_token()]
        except ContractError as error:
            raise ConfigError(f"{model_type}: {error}") from error
        except Exception as error:  # a model's own code may raise anything
            raise ConfigError(
                f"{model_type}: its layers cannot be run without numbers to see what attention they "
                f"call ({in_one_line(error)}). Choose another checkpoint, or run without "
                "--true-on-policy-mode."
            ) from error

    def run_one_token(self) -> list[AttentionCall]:
        """Run the decoder's own code on the meta device; return its attention calls in order."""
        calls: list[AttentionCall] = []

        def record(q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule) -> Tensor:
            calls.append((q, k, v, scores))
            return q.new_empty(*q.shape[:2], v.shape[2])

        tokens = torch.zeros(1, 1, dtype=torch.int64, device="meta")
        nets = delta_nets(self.model)
        with _passed_by(self.norms, self._called_with), _passed_by(nets, {}):
            self.model.base_model(
                input_ids=tokens, position_ids=tokens, use_cache=False, attention_function=record
            )
        return calls


def _shape(q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule) -> AttentionShape:
    return AttentionShape(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        window=scores.window,
        softcap=scores.softcap,
        sinks=scores.sinks is not None,
    )


@contextmanager
def _passed_by(norms: Iterable[nn.Module], called_with: dict[nn.Module, int]) -> Iterator[None]:
    """Replace the forward pass of modules that change no shape, such as norms, by the identity.

    On the meta device norms would take more time than all the rest. The size of each one's input is
    added to `called_with`.
    """

    def pass_by(norm: nn.Module, hidden_states: Tensor, **others: object) -> Tensor:
        called_with[norm] = hidden_states.shape[-1]
        return hidden_states

    for norm in norms:
        norm.forward = partial(pass_by, norm)
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward
