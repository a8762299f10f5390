"""What a teacher must be, and what it holds of a rank's memory, before anything is started."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from onpolicy.config import TrainConfig
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.models.weight_files import require_fit
from onpolicy.run.launch.contracts import contract_for
from onpolicy.train.megatron import make as megatron

FLAG = "--teacher-checkpoint"


def require_teacher(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if the teacher, if there is one, cannot score what the policy samples.

    tokenizer: the policy's.
    """
    path, trust = config.distillation.teacher_checkpoint, config.model.trust_remote_code
    if not path:
        return
    hf_config = load_config(path, trust, FLAG)
    require_fit(path, hf_config, trust, FLAG)
    flags = config.distillation
    if flags.opd_loss == "top-k" and flags.opd_top_k >= hf_config.vocab_size:
        raise ConfigError(
            f"--opd-top-k={flags.opd_top_k}: the teacher knows {hf_config.vocab_size} tokens. "
            "Give fewer, or use --opd-loss=full."
        )
    contract = contract_for(config, hf_config, aligned=config.plan.may_align)
    if config.trainer.train_backend == "megatron":
        megatron.check(config, hf_config, contract)
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(path, trust, FLAG).get_vocab()
    if ours != theirs:
        apart = sorted(
            token for token in ours.keys() | theirs if ours.get(token) != theirs.get(token)
        )
        raise ConfigError(
            f"{FLAG}={path}: its tokenizer is another than the policy's ({len(apart)} tokens differ, "
            f"as {apart[0]!r}), so it cannot score the policy's tokens. Choose a teacher with the "
            "tokenizer of --hf-checkpoint."
        )


def teacher_bytes(config: TrainConfig) -> int:
    """What a rank holds of the teacher: its part of the weights, layers that are gathered, and
    what a loss keeps of what it says."""
    path, trust = config.distillation.teacher_checkpoint, config.model.trust_remote_code
    if not path:
        return 0
    size = ModelSize.of(load_config(path, trust, FLAG), trust)
    itemsize: int = getattr(torch, config.model.dtype).itemsize
    more = _loss_bytes(config, size, itemsize)
    if config.trainer.train_backend == "megatron":
        shards = config.megatron.megatron_tp * config.megatron.megatron_pp
        return itemsize * size.parameters // shards + more
    gathered = (4 + itemsize) * (size.outside_layers + 2 * size.largest_layer)
    return 4 * size.parameters // config.cluster.num_ranks + gathered + more


def _loss_bytes(config: TrainConfig, size: ModelSize, itemsize: int) -> int:
    """What --opd-loss keeps: of each token of a rank's responses, and the teacher's head. Its logits and
    log-probabilities of a chunk are as many as the policy's."""
    flags = config.distillation
    if flags.opd_loss == "sampled":
        return 0
    tokens = config.samples_per_rollout * config.rollout.rollout_max_response_len
    hidden, of_top_k = size.hidden * itemsize, flags.opd_top_k * (8 + 4) + 4
    per_token = hidden if flags.opd_loss == "full" else hidden + of_top_k
    head = size.vocab * size.hidden * itemsize
    return -(-tokens // config.cluster.num_ranks) * per_token + 2 * head
