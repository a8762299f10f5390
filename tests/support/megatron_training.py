"""What ranks of a group (`megatron_ranks.py`) do as trainers of a run."""

from __future__ import annotations

import dataclasses
import random
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from onpolicy.config import TrainConfig, groups
from onpolicy.errors import ParityError
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch.contracts import contract_for
from onpolicy.training import distributed, make_trainer
from tests.support.megatron_ranks import end_groups
from tests.support.processes import command_line
from tests.support.samples import make_train_sample, with_trajectory

BLOCKS = 2
RATES = (1e-3 / 3, 2e-3 / 3, 1e-3)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A trainer; `changes` go into the groups of its configuration."""

    path: Path
    backend: str = "megatron"
    dtype: str = "float32"
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def under(self, layout, **changes):
        return dataclasses.replace(self, changes={**self.changes, "megatron": layout, **changes})

    def config(self):
        config = TrainConfig(
            model=groups.ModelConfig(hf_checkpoint=str(self.path), dtype=self.dtype),
            rollout=groups.RolloutConfig(
                num_rollout=10, rollout_batch_size=4, n_samples_per_prompt=2
            ),
            algorithm=groups.AlgorithmConfig(advantage_estimator="reinforce"),
            trainer=groups.TrainerConfig(train_backend=self.backend, max_tokens_per_gpu=100),
            parity=groups.ParityConfig(true_on_policy_mode=True),
            operators=groups.OperatorsConfig(row_parallel_blocks=BLOCKS),
        )
        for name, values in self.changes.items():
            group = dataclasses.replace(getattr(config, name), **values)
            config = dataclasses.replace(config, **{name: group})
        return config


def make(job, estimator=None):
    """The trainer, in groups of its own."""
    if job.backend == "megatron":
        end_groups()
    distributed.init_process_group()
    config = job.config()
    contract = contract_for(config, load_config(str(job.path)), aligned=True)
    return make_trainer(config, contract, 1, estimator)


def make_samples(trainer, seed=0, wrong=0.0):
    """Random sequences with the trainer's own log-probabilities, of the first `wrong` off."""
    rng = random.Random(seed)
    sequences = [[rng.randrange(2, 137) for _ in range(rng.randrange(8, 60))] for _ in range(8)]
    prompt_lens = [rng.randrange(1, len(s) - 1) for s in sequences]
    log_probs = trainer.log_probs(sequences, prompt_lens, 1.0)
    log_probs[0][0] -= wrong
    return [
        make_train_sample(sequence, prompt_len, values.tolist(), rng.uniform(-1, 1), i)
        for i, (sequence, prompt_len, values) in enumerate(
            zip(sequences, prompt_lens, log_probs, strict=True)
        )
    ]


def draw_samples(trainer, tokens=5):
    """Samples of what the trainer itself draws, pass by pass: token i of a response in pass i."""
    prompts, seeds = [[5, 9, 4], [7], [11, 3]], [101, 202, 303]
    drawn = [[*prompt, *[0] * tokens] for prompt in prompts]
    lens = [len(prompt) for prompt in prompts]
    for place in range(tokens):
        found = trainer.rescore(drawn, lens, 0.7, seeds=seeds)
        for sequence, length, own in zip(drawn, lens, found, strict=True):
            sequence[length + place] = int(own.drawn[place])
    samples = []
    digests = [own.row_digests.tolist() for own in found]
    for i, own in enumerate(trainer.rescore(drawn, lens, 0.7)):
        made = make_train_sample(drawn[i], lens[i], own.log_probs.tolist(), (-1.0) ** i, i)
        made = with_trajectory(made, temperatures=[0.7] * tokens, row_digests=digests[i])
        made.seeds = [(seeds[i], tokens)]
        samples.append(made)
    return samples


def train_on_drawn(job):
    """(metrics of samples that were drawn by their seeds, the error of those that were not, and the
    digests of their rows)"""
    trainer, error = make(job), None
    samples = draw_samples(trainer)
    samples[1].seeds = [(203, 5)]
    try:
        trainer.train(samples, 7, RATES[:1])
    except ParityError as refused:
        error = str(refused)
    samples[1].seeds = [(202, 5)]
    digests = [sample.trajectory.row_digests for sample in samples]
    return trainer.train(samples, 7, RATES[:1]).metrics, error, digests


def weights(trainer):
    """By Hugging Face names, on rank 0."""
    return {
        name: tensor for bucket in trainer.policy.weight_buckets(1 << 30) for name, tensor in bucket
    }


def train(job, steps=2, save=None, load=None, updates=1, leaves=False):
    """(log_probs of the samples of every step, its metrics, weights after the last).

    A step is of one rollout, and of so many updates. `leaves`: the trainer's memory leaves its device
    after each.
    """
    trainer = make(job)
    if load is not None:
        trainer.load(load)
    log_probs, metrics = [], []
    for step in range(0 if load is None else 1, steps):
        samples = make_samples(trainer, seed=step)
        log_probs.append([s.rollout_log_probs for s in samples])
        metrics.append(trainer.train(samples, step, [RATES[step]] * updates).metrics)
        if leaves:
            leave_the_device(trainer)
        if save is not None and step == 0:
            trainer.save(save)
    trainer._bring_back("weights")
    return log_probs, metrics, weights(trainer)


def leave_the_device(trainer):
    """Memory of the optimizer and of gradients, then also of the weights, is none."""
    policy = trainer.policy
    state = [*policy.optimizer_tensors(), *policy.gradient_buffers()]
    own = [*policy.module.parameters()]
    state, own = (
        [x.to_local() if hasattr(x, "to_local") else x for x in tensors] for tensors in (state, own)
    )
    trainer.release_memory("state")
    assert state and not any(x.untyped_storage().nbytes() for x in state)
    assert all(x.untyped_storage().nbytes() for x in own)
    trainer.release_memory("weights")
    assert not any(x.untyped_storage().nbytes() for x in own)


FROZEN = {
    "megatron": ("word_embeddings.weight", "layers.0.mlp.linear_fc1.weight"),
    "fsdp": ("embed_tokens.weight", "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
}
"""How the parameters of the same weights end."""


def train_with_frozen(job, **more):
    """What `train` of `more` returns of a model whose FROZEN parameters ask for no gradient; and the
    digests of those of this rank before and after."""
    import onpolicy.training.fsdp.fsdp_model
    import onpolicy.training.megatron.megatron_model as megatron
    from onpolicy.training.megatron.megatron_weights import first_layer, global_name

    of_backend = {
        "megatron": megatron.MegatronModel,
        "fsdp": onpolicy.training.fsdp.fsdp_model.FsdpModel,
    }[job.backend]
    load_whole, digests = of_backend._load, []

    def load_and_freeze(self, *args):
        module = load_whole(self, *args)
        first = first_layer(module) if job.backend == "megatron" else 0
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not global_name(name, first).endswith(FROZEN[job.backend]))
        return module

    def digest_after(self, rate):
        digests.append(self.frozen_digest())
        take_step(self, rate)
        digests.append(self.frozen_digest())

    take_step = of_backend.take_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_backend, "_load", load_and_freeze)
        patch.setattr(of_backend, "take_step", digest_after)
        return *train(job, **more), digests


def train_on_a_wrong_one(job):
    """(error or None, metrics, weights before, weights after)."""
    trainer = make(job)
    before = {name: tensor.clone() for name, tensor in weights(trainer).items()}
    error, metrics = None, {}
    try:
        metrics = trainer.train(make_samples(trainer, wrong=0.2), 7, [1e-3]).metrics
    except ParityError as refused:
        error = str(refused)
    return error, metrics, before, weights(trainer)


def save_on_a_full_disk(job, directory, size):
    """The error where the system refuses files over some bytes."""
    trainer = make(job)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        trainer.save(directory)
    except (OSError, RuntimeError) as error:  # what a run makes a message of
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return None


def left_after_saving(job, directory):
    """What a trainer's process has started, and has not ended."""
    make(job).save(directory)
    return [command_line(process) for process in psutil.Process().children()]


def load_crafted(job, directory, attack):
    """(error, whether code ran) of a checkpoint with code hidden in it.

    Where torch was told to unpickle everything, as some do for old checkpoints.
    """
    trainer = make(job)
    trainer.save(directory)
    attack(directory / "sharded", directory / "trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        try:
            trainer.load(directory)
        except Exception as error:
            return f"{type(error).__name__}: {error}", (directory / "trace").exists()
    return None, (directory / "trace").exists()


def load_crafted_with_megatrons_readers(job, directory, attack):
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

    from onpolicy.training import state
    from onpolicy.training.megatron import megatron_model as megatron_state

    with pytest.MonkeyPatch.context() as patch:
        reader = strategies.CachedMetadataFileSystemReader
        patch.setattr(megatron_state, "_index_reader", lambda path, cache_metadata: reader(path))
        patch.setattr(state, "IndexReader", reader)
        patch.setattr(megatron_state, "_CommonStrategy", TorchCommonLoadStrategy)
        return load_crafted(job, directory, attack)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
