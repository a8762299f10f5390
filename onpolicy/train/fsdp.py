"""The FSDP2 training engine: one sharded copy of weights, gradients and optimizer state."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ParityError, TrainingError
from onpolicy.models.policy import PackedTokens, PolicyModel
from onpolicy.ops import make_operators
from onpolicy.ops.self_check import self_check
from onpolicy.train import distributed
from onpolicy.train.base import Trainer
from onpolicy.train.batch import MicroBatch, make_micro_batches
from onpolicy.train.checkpoint import load_state, save_state
from onpolicy.train.loss import LossInputs, LossSettings, policy_loss
from onpolicy.train.optimizer import make_optimizer, make_schedule
from onpolicy.train.packing import pack, split_evenly
from onpolicy.train.parity_gate import ParityGate
from onpolicy.train.sharding import gather_buckets, load_sharded_policy
from onpolicy.types import TrainSample
from onpolicy.weights import WeightBucket


class FsdpTrainer(Trainer):
    """FSDP2: compute in the contract's dtype, everything that is summed in float32."""

    def __init__(self, config: TrainConfig, contract: NumericsContract, num_threads: int):
        self.config, self.contract = config, contract
        self.device = _device(contract.device)
        self.dtype: torch.dtype = getattr(torch, contract.dtype)
        self.operators = make_operators(contract, num_threads)
        self.self_check = self_check(self.operators, contract) if contract.is_aligned else {}
        self.model = self._load_model(config.model.hf_checkpoint)
        algorithm = config.algorithm
        self.reference: PolicyModel | None = None
        if algorithm.use_kl_loss:
            self.reference = self._load_model(
                algorithm.ref_checkpoint or config.model.hf_checkpoint
            )
            self.reference.requires_grad_(False)
        self.loss_settings = LossSettings(
            eps_clip=algorithm.eps_clip,
            eps_clip_high=config.eps_clip_high,
            kl_loss_coef=algorithm.kl_loss_coef,
            kl_loss_type=algorithm.kl_loss_type,
        )
        total_steps = config.rollout.num_rollout * config.steps_per_rollout
        self.optimizer = make_optimizer(self.model.parameters(), config.trainer)
        self.schedule = make_schedule(self.optimizer, config.trainer, total_steps)

    def _load_model(self, path: str) -> PolicyModel:
        return load_sharded_policy(
            path,
            self.operators,
            self.dtype,
            device=self.device,
            activation_checkpointing=self.config.trainer.activation_checkpointing,
            trust_remote_code=self.config.model.trust_remote_code,
        )

    def train(self, samples: Sequence[TrainSample], step: int) -> dict[str, float]:
        start = time.perf_counter()
        steps = [
            self._micro_batches([samples[i] for i in part])
            for part in split_evenly(len(samples), self.config.steps_per_rollout)
            if part
        ]
        for micro_batches in steps:
            self._add_fixed_log_probs(micro_batches)
        gate = ParityGate(step, self.config.parity_fails, self._parity_remedy())
        updates = [
            self._optimizer_step(micro_batches, gate if number == 0 else None)
            for number, micro_batches in enumerate(steps)
        ]
        metrics = {name: fmean(update[name] for update in updates) for name in updates[0]}
        tokens = sum(len(s.token_ids) for s in samples)
        seconds = time.perf_counter() - start
        return {
            **metrics,
            **gate.reduce().metrics(),
            "perf/train_time": seconds,
            "perf/train_tokens_per_second": tokens / seconds,
        }

    def _micro_batches(self, samples: list[TrainSample]) -> list[MicroBatch]:
        return make_micro_batches(
            samples,
            rank=distributed.rank(),
            num_ranks=distributed.world_size(),
            max_tokens=self.config.trainer.max_tokens_per_gpu,
            temperature=self.config.rollout.rollout_temperature,
            aggregation=self.config.algorithm.loss_aggregation,
            device=self.device,
        )

    def _add_fixed_log_probs(self, micro_batches: list[MicroBatch]) -> None:
        """Old and reference log-probabilities, before the first optimizer step changes anything.

        Under an aligned contract the old ones are the rollout's: computing them again would give
        the same bits.
        """
        for batch in micro_batches:
            batch.old_log_probs = (
                batch.rollout_log_probs
                if self.contract.is_aligned
                else _score(self.model, batch.packed)
            )
            if self.reference is not None:
                batch.ref_log_probs = _score(self.reference, batch.packed)

    def _optimizer_step(
        self, micro_batches: list[MicroBatch], gate: ParityGate | None
    ) -> dict[str, float]:
        sums: defaultdict[str, float] = defaultdict(float)
        for batch in micro_batches:
            log_probs, entropy = self.model(batch.packed)
            if gate is not None:
                self._check_parity(gate, log_probs, batch)
            loss, metrics = policy_loss(_loss_inputs(log_probs, batch), self.loss_settings)
            # FSDP2 averages gradients over ranks; the loss is a sum over them.
            (loss * distributed.world_size()).backward()
            metrics["train/entropy"] = (entropy * batch.weights).sum()
            for name, value in metrics.items():
                sums[name] += float(value)
        grad_norm = self._clip_gradients()
        learning_rate = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            **_all_reduce(sums, self.device),
            "train/grad_norm": grad_norm,
            "train/lr": learning_rate,
        }

    def _check_parity(self, gate: ParityGate, log_probs: Tensor, batch: MicroBatch) -> None:
        try:
            gate.check(log_probs, batch)
        except ParityError:
            _free_gathered_weights(self.model)
            self.optimizer.zero_grad(set_to_none=True)
            raise

    def _clip_gradients(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.trainer.clip_grad or math.inf
        )
        value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(value):
            raise TrainingError(
                f"grad_norm={value}: a gradient is not finite, so no optimizer step was taken. Lower "
                "--lr, or resume from the last checkpoint with --load."
            )
        return value

    def _parity_remedy(self) -> str:
        return (
            "To find out which part differs, run: onpolicy verify --hf-checkpoint "
            f"{self.config.model.hf_checkpoint} --dtype {self.contract.dtype}"
        )

    def log_probs(
        self, sequences: Sequence[list[int]], prompt_lens: Sequence[int], temperature: float
    ) -> list[Tensor]:
        lens = [len(s) for s in sequences]
        plan = pack(lens, distributed.world_size(), self.config.trainer.max_tokens_per_gpu)
        mine: dict[int, Tensor] = {}
        for indices in plan[distributed.rank()]:
            packed = PackedTokens.pack(
                [sequences[i] for i in indices] or [[0, 0]],
                [prompt_lens[i] for i in indices] or [1],
                temperature,
                self.device,
            )
            responses = [lens[i] - prompt_lens[i] for i in indices]
            log_probs = _score(self.model, packed)[: sum(responses)].cpu()
            mine.update(zip(indices, log_probs.split(responses), strict=True))
        results = {i: part for ours in distributed.gather_objects(mine) for i, part in ours.items()}
        return [results[i] for i in range(len(sequences))]

    def weight_buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        return gather_buckets(self.model, self.dtype, max_bytes)

    def save(self, directory: Path) -> None:
        save_state(directory, self.model, self.optimizer, self.schedule)

    def load(self, directory: Path) -> None:
        load_state(directory, self.model, self.optimizer, self.schedule)


def _device(kind: str) -> torch.device:
    if kind == "cuda":
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device(kind)


def _score(model: PolicyModel, packed: PackedTokens) -> Tensor:
    """Log-probabilities without a gradient: float32 [R]."""
    with torch.no_grad():
        log_probs, _ = model(packed)
    _free_gathered_weights(model)
    return log_probs


def _free_gathered_weights(model: PolicyModel) -> None:
    """After a forward pass, FSDP2 keeps the root's weights gathered for a backward pass to come."""
    assert isinstance(model, FSDPModule)
    model.reshard()


def _loss_inputs(log_probs: Tensor, batch: MicroBatch) -> LossInputs:
    assert batch.old_log_probs is not None
    return LossInputs(
        log_probs=log_probs,
        old_log_probs=batch.old_log_probs,
        advantages=batch.advantages,
        weights=batch.weights,
        ref_log_probs=batch.ref_log_probs,
    )


def _all_reduce(sums: dict[str, float], device: torch.device) -> dict[str, float]:
    names = sorted(sums)
    values = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(values)
    return dict(zip(names, values.tolist(), strict=True))
