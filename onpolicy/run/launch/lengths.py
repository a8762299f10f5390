"""Default lengths that were not given, and the log line about them; --share-prefixes auto."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TypeVar

from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.config.kinds import Unasked
from onpolicy.config.tools import VerifyConfig
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch.sharing import fit_sharing

Verify = TypeVar("Verify", bound=VerifyConfig)

logger = logging.getLogger(__name__)


def fit_run(config: TrainConfig) -> TrainConfig:
    """Return a run whose default response length leaves half of the context to prompts, and which has
    decided whether it shares prefixes."""
    hf_config = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
    flag, asked = "--rollout-max-response-len", config.rollout.rollout_max_response_len
    length = fit_length(flag, asked, hf_config.max_position_embeddings // 2, hf_config)
    fitted = replace(config, rollout=replace(config.rollout, rollout_max_response_len=length))
    return fit_sharing(fitted)


def fit_verify(config: Verify) -> Verify:
    """Return a `verify` whose default response length leaves half of the context to prompts."""
    hf_config = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
    most = hf_config.max_position_embeddings // 2
    return replace(
        config,
        max_new_tokens=fit_length("--max-new-tokens", config.max_new_tokens, most, hf_config),
    )


def fit_length(flag: str, length: int, most: int, hf_config: PretrainedConfig) -> int:
    """Return a flag's length; a default is lowered to `most` tokens, but not below 1."""
    if not isinstance(length, Unasked) or length <= most:
        return int(length)
    logger.info(
        "%s %d, not %d: it was not given, and this is what the model's context of %d leaves",
        flag, max(1, most), length, hf_config.max_position_embeddings,
    )  # fmt: skip
    return max(1, most)
