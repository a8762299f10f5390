"""The FSDP2 training engine: one sharded copy of weights, gradients and optimizer state."""

from __future__ import annotations

import logging
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

from fallback_correction.length_decay import LengthDecaySchedule
from onpolicy.config import TrainConfig
from onpolicy.config.groups import FallbackConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ParityError, TrainingError
from onpolicy.models.align import replace_operators
from onpolicy.models.policy import PackedTokens, PolicyModel
from onpolicy.ops import make_operators
from onpolicy.ops.self_check import self_check
from onpolicy.train import distributed
from onpolicy.train.base import Trainer
from onpolicy.train.batch import MicroBatch, make_micro_batches
from onpolicy.train.checkpoint import load_state, save_state
from onpolicy.train.correction import Corrections, loss_settings
from onpolicy.train.loss import policy_loss
from onpolicy.train.optimizer import make_optimizer, make_schedule
from onpolicy.train.packing import pack, split_evenly
from onpolicy.train.parity_gate import ParityGate
from onpolicy.train.sharding import gather_buckets, load_sharded_policy
from onpolicy.types import TrainSample
from onpolicy.weights import WeightBucket

logger = logging.getLogger(__name__)


class FsdpTrainer(Trainer):
    """FSDP2: compute in the contract's dtype, everything that is summed in float32."""

    def __init__(self, config: TrainConfig, contract: NumericsContract, num_threads: int):
        self.config, self.num_threads = config, num_threads
        self.device = _device(contract.device)
        self.dtype: torch.dtype = getattr(torch, contract.dtype)
        self._use_operators(contract)
        self.model = self._load_model(config.model.hf_checkpoint)
        algorithm = config.algorithm
        self.reference: PolicyModel | None = None
        if algorithm.use_kl_loss:
            self.reference = self._load_model(
                algorithm.ref_checkpoint or config.model.hf_checkpoint
            )
            self.reference.requires_grad_(False)
        self.loss_settings = loss_settings(config)
        self.corrections = Corrections(config)
        self.optimizer = make_optimizer(self.model.parameters(), config.trainer)
        self.schedule = make_schedule(self.optimizer, config)
        self.lr_scale = 1.0

    def _use_operators(self, contract: NumericsContract) -> None:
        self.contract = contract
        self.operators = make_operators(contract, self.num_threads)
        self.self_check = self_check(self.operators, contract) if contract.is_aligned else {}

    def _load_model(self, path: str) -> PolicyModel:
        return load_sharded_policy(
            path,
            self.operators,
            self.dtype,
            device=self.device,
            activation_checkpointing=self.config.trainer.activation_checkpointing,
            trust_remote_code=self.config.model.trust_remote_code,
        )

    def adapt(self, contract: NumericsContract, fallback: FallbackConfig, lr_scale: float) -> None:
        if contract != self.contract:
            self._use_operators(contract)
            for model in (self.model, self.reference):
                if model is not None:
                    replace_operators(model, self.operators)
        self.corrections.use(fallback)
        self.lr_scale = lr_scale

    def observe_rollout(self, mean_response_length: float, truncated_ratio: float) -> None:
        if isinstance(self.schedule, LengthDecaySchedule):
            self.schedule.observe(mean_response_length, truncated_ratio)

    def train(self, samples: Sequence[TrainSample], step: int) -> dict[str, float]:
        start = time.perf_counter()
        steps = [
            self._micro_batches([samples[i] for i in part])
            for part in split_evenly(len(samples), self.config.steps_per_rollout)
            if part
        ]
        try:
            metrics = self._train_on(
                steps, self._gate(step), corrected=not self.contract.is_aligned
            )
        except ParityError as error:
            if not self._falls_back:
                raise
            logger.error("%s Going on with the fallback correction.", error)
            gate = ParityGate(step, fails=False, warns=False, remedy="")
            metrics = self._train_on(steps, gate, corrected=True)
            metrics["parity/num_fallbacks"] = 1.0
        if isinstance(self.schedule, LengthDecaySchedule):
            metrics |= self.schedule.decay.metrics()
        seconds = time.perf_counter() - start
        return {
            **metrics,
            "perf/train_time": seconds,
            "perf/train_tokens_per_second": sum(len(s.token_ids) for s in samples) / seconds,
        }

    def _train_on(
        self, steps: list[list[MicroBatch]], gate: ParityGate, *, corrected: bool
    ) -> dict[str, float]:
        """The optimizer steps of a rollout; `corrected`: as one that is not aligned."""
        start = time.perf_counter()
        self._add_fixed_log_probs(
            steps, corrected and not self.config.fallback.use_rollout_logprobs
        )
        seconds = time.perf_counter() - start
        metrics = self.corrections.prepare(steps, active=corrected)
        updates = [
            self._optimizer_step(micro_batches, gate if number == 0 else None)
            for number, micro_batches in enumerate(steps)
        ]
        metrics |= {name: fmean(update[name] for update in updates) for name in updates[0]}
        if corrected:
            metrics |= self.corrections.measure(steps[0])
        return {**metrics, **gate.reduce().metrics(), "perf/log_probs_time": seconds}

    @property
    def _falls_back(self) -> bool:
        return self.contract.is_aligned and self.config.parity_policy == "fallback"

    def _gate(self, step: int) -> ParityGate:
        # What an unaligned rollout mismatches by stands in the metrics; it is no news in the log.
        aligned, asked = self.contract.is_aligned, self.config.parity.parity_policy
        fails = asked == "fail" or (aligned and self.config.parity_policy in ("fail", "fallback"))
        return ParityGate(step, fails=fails, warns=aligned, remedy=self._parity_remedy())

    def _micro_batches(self, samples: list[TrainSample]) -> list[MicroBatch]:
        return make_micro_batches(
            samples,
            rank=distributed.rank(),
            num_ranks=distributed.world_size(),
            max_tokens=self.config.trainer.max_tokens_per_gpu,
            temperature=self.config.rollout.rollout_temperature,
            device=self.device,
        )

    def _add_fixed_log_probs(self, steps: list[list[MicroBatch]], recompute: bool) -> None:
        """Old and reference log-probabilities, before the first optimizer step changes anything.

        Under an aligned contract the old ones are the rollout's: computing them again would give
        the same bits.
        """
        for batch in (batch for step in steps for batch in step):
            batch.old_log_probs = (
                _score(self.model, batch.packed) if recompute else batch.rollout_log_probs
            )
            if self.reference is not None and batch.ref_log_probs is None:
                batch.ref_log_probs = _score(self.reference, batch.packed)

    def _optimizer_step(
        self, micro_batches: list[MicroBatch], gate: ParityGate | None
    ) -> dict[str, float]:
        sums: defaultdict[str, float] = defaultdict(float)
        for batch in micro_batches:
            log_probs, entropy = self.model(batch.packed)
            batch.train_log_probs = log_probs.detach()
            if gate is not None:
                self._check_parity(gate, log_probs, batch)
            loss, metrics = policy_loss(log_probs, batch, self.loss_settings)
            # FSDP2 averages gradients over ranks; the loss is a sum over them.
            (loss * distributed.world_size()).backward()
            metrics["train/entropy"] = (entropy * batch.shares).sum()
            for name, value in metrics.items():
                sums[name] += float(value)
        grad_norm = self._clip_gradients()
        learning_rate = self._step_optimizer()
        return {
            **_all_reduce(sums, self.device),
            "train/grad_norm": grad_norm,
            "train/lr": learning_rate,
        }

    def _step_optimizer(self) -> float:
        """Take the step; returns its learning rate."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * self.lr_scale
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(rates[0] * self.lr_scale)

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
        numbers = {
            "schedule": self.schedule.state_dict(),
            "corrections": self.corrections.state_dict(),
        }
        save_state(directory, self.model, self.optimizer, numbers)

    def load(self, directory: Path) -> None:
        numbers = load_state(directory, self.model, self.optimizer)
        self.schedule.load_state_dict(numbers["schedule"])
        self.corrections.load_state_dict(numbers["corrections"])


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


def _all_reduce(sums: dict[str, float], device: torch.device) -> dict[str, float]:
    names = sorted(sums)
    values = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(values)
    return dict(zip(names, values.tolist(), strict=True))
