"""Model configuration by the trainer's function, the same on both sides.

SGLang has its own classes for some models, which lack fields that its transformers backend needs
(OLMo-3) or from which transformers cannot build a model (Kimi-K2), and its backend always trusts
the code in a checkpoint.

Of a model that also sees images the text part is served, in aligned engines and in others: the
weights get the names that it has alone, and those of other parts are not loaded, but for the tower
of an engine that sees (layer_images.py).

Source: HfModelConfigParser, sglang/srt/utils/hf_transformers/config.py;
DefaultModelLoader._get_weights_iterator, sglang/srt/model_loader/loader.py. Can go when SGLang takes a
configuration from a caller, and names of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from onpolicy.contract import NumericsContract
from onpolicy.errors import ContractError
from onpolicy.models.published import is_known, read_config
from onpolicy.models.rotary_factors import choose_factors
from onpolicy.models.text_part import has_text_part, own_name, tower_name
from sglang_patches import registry

LOAD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
WEIGHTS_TARGET = "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator"


def serve_text_parts(contract: NumericsContract) -> None:
    """Hook the reading of configurations and weights, for models that also see images."""
    from sglang.srt.utils.hf_transformers import config

    stock = config.AutoConfig

    class TextPartsConfig(stock):  # type: ignore[misc,valid-type]
        """A reader of the trainer's configuration for such models, and of SGLang's for others."""

        @classmethod
        def from_pretrained(cls, path: str, *args: Any, **settings: Any) -> PretrainedConfig:
            if has_text_part(path):
                return read_config(path, bool(settings.get("trust_remote_code")))
            found: PretrainedConfig = stock.from_pretrained(path, *args, **settings)
            return found

    config.AutoConfig = TextPartsConfig
    registry.note("text parts")

    def of_part(weights: Weights, loader: Any, source: Any, **_: Any) -> Weights:
        is_whole = has_text_part(source.model_or_path)
        return _own(weights, sees=bool(contract.images)) if is_whole else weights

    registry.hook(WEIGHTS_TARGET, of_part, "after")


Weights = Iterable[tuple[str, Tensor]]


def _own(weights: Weights, *, sees: bool) -> Iterator[tuple[str, Tensor]]:
    for stored, tensor in weights:
        own = own_name(stored) or (tower_name(stored) if sees else None)
        if own is not None:
            yield own, tensor


def install(contract: NumericsContract) -> None:
    from sglang.srt.utils.hf_transformers import common, config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    class TrainersConfig(config.AutoConfig):
        """A reader of the trainer's configuration."""

        @classmethod
        def from_pretrained(
            cls, path: str, trust_remote_code: bool = False, **_: Any
        ) -> PretrainedConfig:
            return trainers_config(path, trust_remote_code, contract)

    for model_type in list(common._CONFIG_REGISTRY):
        if is_known(model_type):
            CONFIG_MAPPING._extra_content.pop(model_type, None)
        if is_known(model_type) or model_type in OTHER_NAMES:
            del common._CONFIG_REGISTRY[model_type]
    config.AutoConfig = TrainersConfig
    registry.note("transformers' configurations")
    if contract.context is not None:
        registry.hook(LOAD_TARGET, _require_context, "after")


OTHER_NAMES = ("kimi_k2",)
"""Other model_type names of architectures that transformers knows."""


def trainers_config(
    path: str, trust_remote_code: bool, contract: NumericsContract
) -> PretrainedConfig:
    """Return the configuration that the trainer computes with."""
    found = read_config(path, trust_remote_code)
    if contract.context is not None:
        choose_factors(found, contract.context)
    return found


def _require_context(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
    served, chosen = runner.model_config.context_len, registry.contract().context
    if served != chosen:
        raise ContractError(
            f"context_len={served}: the angles of this model's rotary embedding were chosen for "
            f"{chosen} tokens. Start the engine with --context-length {chosen}."
        )
    return result
