"""Checks of a run's inputs against each other (flags, checkpoints, prompts, ranks, and a journal to
replay), and of this machine: whether weights can be pushed with the chosen --weight-sync.

`fit_run` and `fit_verify` choose the lengths that were not given, and log them; `fit_run` also decides
--share-prefixes auto, of which `sharing_described` tells.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig

from onpolicy.config import TrainConfig, groups, settings
from onpolicy.config.groups.agent_flags import has_agent
from onpolicy.config.kinds import Unasked
from onpolicy.config.rules import rule_against
from onpolicy.config.tool_flags import VerifyConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.models.expert_layers import can_be_replayed
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import has_experts, load_config
from onpolicy.models.weight_files import CheckpointReader, require_fit
from onpolicy.outputs import recorded_order
from onpolicy.outputs.recorded_order import RolloutJournal
from onpolicy.rollout.engine_args import CONTEXT_MARGIN
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.saving.checkpoint import digest_prompts
from onpolicy.training.megatron import make as megatron
from onpolicy.types import Prompt
from onpolicy.weights.transports import shares_gpus

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")

MIB = 1 << 20

Verify = TypeVar("Verify", bound=VerifyConfig)


def check_layout(config: TrainConfig) -> None:
    """Raise ConfigError if the model cannot be laid out over the run's ranks; starts nothing."""
    if config.trainer.train_backend == "megatron":
        hf_config = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
        megatron.check(config, hf_config, contract_for(config, hf_config, aligned=False))


def require_experts(config: TrainConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError if expert choices are to be replayed and the model has none that can be."""
    if not config.fallback.use_rollout_routing_replay:
        return
    architecture = (hf_config.architectures or ["none"])[0]
    if not has_experts(hf_config):
        raise ConfigError(
            f"--use-rollout-routing-replay: architecture={architecture} has no experts to choose. "
            "Leave it out."
        )
    if not can_be_replayed(ModelFacts(hf_config, config.model.trust_remote_code)):
        raise ConfigError(
            f"--use-rollout-routing-replay: architecture={architecture} has routers that do not "
            "choose by top-k over all experts, which is what is replayed. Leave it out."
        )


def require_context(config: TrainConfig, hf_config: PretrainedConfig) -> int:
    """Return the number of tokens of the longest prompt that leaves room for the longest response.
    Raises ConfigError if that response alone does not fit the model's context."""
    lengths = {
        "--rollout-max-response-len": config.rollout.rollout_max_response_len,
        "--eval-max-response-len": config.eval.eval_max_response_len or 0,
    } | {
        f"--eval-config: {name}: max_response_len": each.max_response_len
        for name, each in config.eval_sets.items()
    }
    flag, longest = max(lengths.items(), key=lambda item: item[1])
    room: int = hf_config.max_position_embeddings - CONTEXT_MARGIN - longest
    if room <= 0:
        raise ConfigError(
            f"{flag}={longest}: with {CONTEXT_MARGIN} tokens that SGLang keeps free it "
            f"does not fit the model's context of {hf_config.max_position_embeddings}. Lower it."
        )
    asked = config.agent.rollout_max_context_len
    if asked is not None:
        if asked > room + longest:
            raise ConfigError(
                f"--rollout-max-context-len={asked}: does not fit the model's context of "
                f"{hf_config.max_position_embeddings}, of which SGLang keeps {CONTEXT_MARGIN} tokens "
                "free. Lower it."
            )
        room = asked - longest
    return room


def require_full_batch(config: TrainConfig, num_prompts: int) -> None:
    """Raise ConfigError if a rollout takes more prompts than the file has."""
    size = config.rollout.rollout_batch_size
    if size > num_prompts:
        raise ConfigError(
            f"--rollout-batch-size={size}: --prompt-data={config.data.sources} has {num_prompts} "
            "prompts that differ, fewer than a rollout takes. Lower it (and raise "
            "--n-samples-per-prompt for as many samples), or give more prompts."
        )


def require_weights(config: TrainConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError if a checkpoint's weights (policy, reference or critic) do not have its model's
    shapes, or if reference or critic cannot be computed or laid out as the policy is."""
    model = config.model
    require_fit(model.hf_checkpoint, hf_config, model.trust_remote_code, sees=model.images)
    others = {
        "--ref-checkpoint": config.algorithm.ref_checkpoint * config.algorithm.reads_reference,
        "--critic-load": config.critic.critic_load,
    }
    plain = replace(config, lora=groups.LoraConfig())
    for flag, path in others.items():
        if not path:
            continue
        own = load_config(path, model.trust_remote_code, flag)
        if own.vocab_size != hf_config.vocab_size:
            raise ConfigError(
                f"{flag}={path}: vocab_size={own.vocab_size}, and the policy's is "
                f"{hf_config.vocab_size}. Choose a checkpoint with the policy's tokenizer."
            )
        of_critic = flag == "--critic-load"
        sees = model.images and not of_critic
        require_fit(path, own, model.trust_remote_code, flag, of_critic=of_critic, sees=sees)
        try:
            # Adapters are the policy's alone.
            contract = contract_for(plain, own, aligned=config.plan.may_align)
            if config.trainer.train_backend == "megatron":
                megatron.check(config, own, contract)
        except ConfigError as error:
            raise ConfigError(f"{flag}={path}: {error}") from error


def require_transport(config: TrainConfig, contract: NumericsContract) -> None:
    """Raise ConfigError if there is no GPU for CUDA IPC, or no room for a bucket in shared memory."""
    way = config.sync.weight_sync
    if way == "ipc" and contract.device != "cuda":
        raise ConfigError(
            "--weight-sync=ipc: engines open the memory of the trainer's GPUs, and this machine has "
            "none. Choose --weight-sync tensor."
        )
    is_shared = way == "tensor" or (way == "auto" and not shares_gpus(config, contract.device))
    if is_shared and SHARED_MEMORY.is_dir():
        _require_shared_memory(config, contract)


def _require_shared_memory(config: TrainConfig, contract: NumericsContract) -> None:
    largest, bucket = _largest_bucket(config, contract)
    disk = shutil.disk_usage(SHARED_MEMORY)
    if bucket <= disk.free:
        return
    lower = "" if largest > disk.free else ", lower --update-weight-buffer-size"
    sync = config.sync
    raise ConfigError(
        f"--weight-sync={sync.weight_sync}: a push puts up to {bucket / MIB:.0f} MiB of weights into "
        f"shared memory at a time (--update-weight-buffer-size={sync.update_weight_buffer_size}; the "
        f"largest weight has {largest / MIB:.0f}), and {SHARED_MEMORY} has {disk.free / MIB:.0f} MiB "
        f"free of {disk.total / MIB:.0f}. Start the container with more (docker run --shm-size=8g)"
        f"{lower}, or choose --weight-sync disk."
    )


def _largest_bucket(config: TrainConfig, contract: NumericsContract) -> tuple[int, int]:
    """Return the bytes of the largest weight, and of the largest bucket."""
    itemsize = getattr(torch, contract.dtype).itemsize
    stored = CheckpointReader(config.model.hf_checkpoint).shapes().values()
    sizes = [tensor.numel() * itemsize for tensor in stored]
    buffer = config.sync.update_weight_buffer_size * MIB
    return max(sizes), max(min(sum(sizes), buffer), max(sizes))


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


def read_replayed(config: TrainConfig, prompts: Sequence[Prompt]) -> RolloutJournal | None:
    """Return the journal that --replay names, if any. Raises ConfigError for the first difference
    between its run and this one, and for a missing rollout."""
    if not (file := config.rollout.replay):
        return None
    journal, digest = recorded_order.read(file), digest_prompts(prompts)
    for start in journal.starts:
        _require_settings(file, start.config, config)
        if start.prompts != digest and "prompt_data" not in config.output.allow_changed_settings:
            raise ConfigError(
                f"--prompt-data={config.data.sources}: its prompts are others than those of the run "
                f"that wrote --replay={file}. Give the same, or add --allow-changed-settings "
                "prompt_data."
            )
    first = min(journal.steps) if config.output.load else 0
    require_steps(journal, first, config.rollout.num_rollout)
    return journal


def require_steps(journal: RolloutJournal, first: int, last: int) -> None:
    """Raise ConfigError if a rollout from `first` on and before `last` is missing."""
    for step in range(first, last):
        if step not in journal.steps:
            raise ConfigError(
                f"--replay={journal.file}: holds rollouts {min(journal.steps)} to "
                f"{max(journal.steps)}, and not rollout {step}, which this run would come to. Give "
                f"--num-rollout up to {max(journal.steps) + 1}; a journal that begins later needs "
                "--load of the checkpoint that its run went on from."
            )


def _require_settings(file: str, recorded: Mapping[str, Any], config: TrainConfig) -> None:
    for change in settings.changes(recorded, config):
        name = change.name
        is_shorter = name == "num_rollout" and config.trainer.lr_decay_style == "constant"
        if is_shorter or name == "hf_checkpoint":  # the digest of the pushed weights tells
            continue
        if name not in config.output.allow_changed_settings:
            raise ConfigError(
                f"--replay={file}: is the journal of another run: {change}. Give what that run was "
                f"given (its config.json has it), or add --allow-changed-settings {name} if it decides "
                "nothing here."
            )
        logger.warning("--replay=%s: replayed under a changed setting: %s", file, change)


def fit_sharing(config: TrainConfig) -> TrainConfig:
    """Return the run with --share-prefixes auto resolved: on where it is tested and saves something."""
    if config.trainer.share_prefixes != "auto":
        return config
    trainer = replace(config.trainer, share_prefixes="off" if _reason_not_to(config) else "on")
    return replace(config, trainer=trainer)


def _reason_not_to(config: TrainConfig) -> str:
    """Return the reason why `auto` shares nothing, or "" if it shares."""
    asked = replace(config, trainer=replace(config.trainer, share_prefixes="on"))
    if contradiction := rule_against(asked, "share_prefixes"):
        return contradiction
    reasons = {
        "on a GPU it was tried once, with triton": torch.cuda.is_available(),
        "a prompt has one sample": config.rollout.n_samples_per_prompt == 1
        and not has_agent(config.agent),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def distinct_share(prompt_lens: Sequence[int], response_len: int, n: int) -> float:
    """Return the fraction of distinct tokens in n responses of `response_len` tokens to each prompt;
    shorter responses have a smaller one."""
    prompt = fmean(prompt_lens)
    return (prompt + n * response_len) / (n * (prompt + response_len))


def sharing_described(config: TrainConfig, prompt_lens: Sequence[int]) -> str:
    """Return a line on whether prefixes are shared, and the share of tokens left to compute."""
    why = _reason_not_to(config) or "--share-prefixes off"
    is_on = config.trainer.shares_prefixes
    said = "prefixes are shared" if is_on else f"prefixes are not shared ({why})"
    if has_agent(config.agent):
        return f"{said}: how much that saves is up to the episodes"
    n, longest = config.rollout.n_samples_per_prompt, config.rollout.rollout_max_response_len
    share = distinct_share(prompt_lens, longest, n)
    return (
        f"{said}: {n} responses of at most {longest} tokens to a prompt of "
        f"{fmean(prompt_lens):.0f} have at most {share:.0%} distinct tokens"
    )
