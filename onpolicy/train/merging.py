"""Merging of adapters into the weights of each push, for engines without adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from transformers import PreTrainedModel

from onpolicy.config.groups import ModelConfig
from onpolicy.contract import AdapterShape
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.merged import Merged, merge_push
from onpolicy.models.weight_files import matched_model
from onpolicy.weights.digest import WeightBucket, WeightPart


class MergedPush:
    """The weights of a push with merged adapters, and the rounding loss of the last push."""

    def __init__(self, config: ModelConfig, adapter: AdapterShape):
        self._config, self._scale = config, adapter.scale
        self._last = Merged()

    @cached_property
    def _model(self) -> PreTrainedModel:
        """Return the model without weights; it maps the tensors of a checkpoint to parameters."""
        path, trust = self._config.hf_checkpoint, self._config.trust_remote_code
        return matched_model(path, load_config(path, trust), trust)

    def buckets(self, parts: Mapping[WeightPart, Iterator[WeightBucket]]) -> Iterator[WeightBucket]:
        """Yield all weights from both parts; all trained weights are gathered first."""
        self._last = Merged()
        given = parts["trained"], parts["frozen"], self._model, self._scale
        return merge_push(*given, self._last)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last merge; empty where this rank sent nothing."""
        if not self._last.linears:
            return {}
        return {
            "lora/merged_changed": self._last.changed_share,
            "lora/merged_rounding": self._last.rounding,
        }
