"""The checks of teachers, and their share of a rank's memory, before anything is started."""

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from onpolicy.agents.environments.environment_choice import environment_rows
from onpolicy.config import TrainConfig
from onpolicy.config.groups.agent_flags import is_of_verifiers
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.models.weight_files import require_fit
from onpolicy.rollout.data_files import Row
from onpolicy.rollout.prompts import rows_of
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.teacher_servers import require_teacher_servers
from onpolicy.training.megatron import make as megatron

FLAG = "--teacher-checkpoint"


def require_teachers(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if a teacher cannot score the policy's tokens, or if a prompt's row names
    no teacher. tokenizer: the policy's."""
    for path in config.distillation.teachers.values():
        _require_teacher(path, config, tokenizer)
    require_teacher_servers(config, tokenizer)
    if config.distillation.teachers and config.distillation.opd_loss != "sampled":
        _require_one_vocabulary(config)
    if config.distillation.teacher_key:
        _require_routes(config)


def _require_teacher(path: str, config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    flags, trust = config.distillation, config.model.trust_remote_code
    hf_config = load_config(path, trust, FLAG)
    require_fit(path, hf_config, trust, FLAG)
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
        apart = sorted({token for token, _ in ours.items() ^ theirs.items()})
        raise ConfigError(
            f"{FLAG}={path}: its tokenizer is another than the policy's ({len(apart)} tokens differ, "
            f"as {apart[0]!r}), so it cannot score the policy's tokens. Choose a teacher with the "
            "tokenizer of --hf-checkpoint."
        )


def _require_one_vocabulary(config: TrainConfig) -> None:
    """Raise ConfigError if the teachers' vocabularies differ in size: the loss needs one for all."""
    trust = config.model.trust_remote_code
    teachers = config.distillation.teachers
    sizes = {name: load_config(path, trust, FLAG).vocab_size for name, path in teachers.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"--opd-loss={config.distillation.opd_loss}: the teachers' vocabularies are padded to "
            f"different sizes ({listed}). Take teachers of one size, or --opd-loss=sampled."
        )


def _require_routes(config: TrainConfig) -> None:
    key, names = config.distillation.teacher_key, config.distillation.names
    for where, row in _rows(config):
        name = row.get(key)
        if not isinstance(name, str) or name not in names:
            found = f"{key}={name!r}" if key in row else f"no field {key!r}"
            raise ConfigError(
                f"{where}: {found}, and the row's teacher must be one of {', '.join(names)}. Correct "
                f"the row, or set --teacher-key to another field, or add its name to {FLAG} or "
                "--teacher-url."
            )


def _rows(config: TrainConfig) -> Iterator[Row]:
    if is_of_verifiers(config.agent):
        yield from environment_rows(config.agent)
        return
    for source in config.data.prompt_data:
        yield from rows_of(source, config.data.reasoning_gym_size, config.seed, "--prompt-data")


def teacher_bytes(config: TrainConfig) -> int:
    """Return a rank's bytes for all teachers: weights, gathered layers, and the loss's copies."""
    trust = config.model.trust_remote_code
    paths = config.distillation.teachers.values()
    sizes = [ModelSize.of(load_config(path, trust, FLAG), trust) for path in paths]
    itemsize: int = getattr(torch, config.model.dtype).itemsize
    weights = sum(_weight_bytes(config, size, itemsize) for size in sizes)
    return weights + _loss_bytes(config, sizes, itemsize)


def _weight_bytes(config: TrainConfig, size: ModelSize, itemsize: int) -> int:
    if config.trainer.train_backend == "megatron":
        shards = config.megatron.megatron_tp * config.megatron.megatron_pp
        return itemsize * size.parameters // shards
    gathered = (4 + itemsize) * (size.outside_layers + 2 * size.largest_layer)
    return 4 * size.parameters // config.cluster.shard_ranks + gathered


def _loss_bytes(config: TrainConfig, sizes: Sequence[ModelSize], itemsize: int) -> int:
    """Return the bytes that --opd-loss keeps: for each token of a rank's responses, and the
    teachers' heads. Logits and log-probabilities of a chunk take as much as the policy's."""
    flags = config.distillation
    if flags.opd_loss == "sampled" or not flags.names:
        return 0
    tokens = config.samples_per_rollout * config.rollout.rollout_max_response_len
    hidden = max((size.hidden for size in sizes), default=0) * itemsize
    per_token = hidden if flags.opd_loss == "full" else hidden + flags.opd_top_k * (8 + 4) + 4
    heads = sum(2 * size.vocab * size.hidden * itemsize for size in sizes)
    return -(-tokens // config.cluster.num_ranks) * per_token + heads
