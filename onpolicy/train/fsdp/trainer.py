"""The FSDP2 training engine: one sharded copy of weights, gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ParityError
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PackedTokens, PolicyModel
from onpolicy.ops import Operators
from onpolicy.taps.door import recording
from onpolicy.taps.recorder import Call, Recorder
from onpolicy.train import distributed
from onpolicy.train.activations import recomputes_activations
from onpolicy.train.batch import WeighedBatch
from onpolicy.train.fsdp.gradients import sum_gradients
from onpolicy.train.fsdp.optimizer import clip_gradients, make_optimizer, take_step
from onpolicy.train.fsdp.sharding import gather_buckets, load_sharded_policy
from onpolicy.train.fsdp.state import read_tensors, write_tensors
from onpolicy.train.gradient_norm import global_norm
from onpolicy.train.loss import policy_loss
from onpolicy.train.parity_gate import ParityGate
from onpolicy.train.policy_trainer import PolicyTrainer
from onpolicy.weights.digest import WeightBucket


class FsdpTrainer(PolicyTrainer):
    """FSDP2: compute in the contract's dtype, everything that is summed in float32."""

    optimizer: torch.optim.AdamW

    def __init__(self, config: TrainConfig, contract: NumericsContract, num_threads: int):
        super().__init__(config, contract, num_threads)
        self.model = self._load_model(config.model.hf_checkpoint)
        self.turn = sum_gradients(self.model, in_order=config.is_rank_invariant)
        algorithm = config.algorithm
        self.reference: PolicyModel | None = None
        if algorithm.use_kl_loss:
            self.reference = self._load_model(
                algorithm.ref_checkpoint or config.model.hf_checkpoint
            )
            self.reference.requires_grad_(False)
        self.optimizer = make_optimizer(
            self.model.parameters(), config.trainer, portable=config.operators.is_portable
        )

    def _load_model(self, path: str) -> PolicyModel:
        hf_config = load_config(path, self.config.model.trust_remote_code)
        return load_sharded_policy(
            path,
            self.operators,
            self.dtype,
            device=self.device,
            activation_checkpointing=recomputes_activations(self.config.trainer, hf_config),
            trust_remote_code=self.config.model.trust_remote_code,
            row_parallel_blocks=self.contract.row_parallel_blocks,
            context=self.contract.context,
        )

    def _put_operators(self, operators: Operators) -> None:
        for model in (self.model, self.reference):
            if model is not None:
                model.use(operators)

    def _score(self, batches: Sequence[PackedTokens], *, reference: bool = False) -> list[Tensor]:
        model = self.reference if reference else self.model
        assert model is not None
        with torch.no_grad():
            scores = [model(packed)[0] for packed in batches]
        _free_gathered_weights(model)
        return scores

    def _accumulate_gradients(
        self, micro_batches: Sequence[WeighedBatch], gate: ParityGate | None
    ) -> tuple[dict[str, float], list[Tensor]]:
        metrics, train_log_probs = [], []
        for number, batch in enumerate(micro_batches):
            log_probs, entropy = self.model(batch.packed)
            train_log_probs.append(log_probs.detach())
            if gate is not None:
                self._check_parity(gate, log_probs, batch)
            loss, found = policy_loss(log_probs, batch, self.loss_settings)
            self.turn.is_first, self.turn.is_filler = number == 0, batch.is_filler
            loss.backward()
            found["train/entropy"] = (entropy * batch.shares).sum()
            if self.model.replay is not None:
                found |= self.model.replay.counts()
            metrics.append({name: float(value) for name, value in found.items()})
        return distributed.sum_micro_batches(metrics), train_log_probs

    def _check_parity(self, gate: ParityGate, log_probs: Tensor, batch: WeighedBatch) -> None:
        try:
            gate.check(log_probs, batch)
        except ParityError:
            _free_gathered_weights(self.model)
            self.optimizer.zero_grad(set_to_none=True)
            raise

    def _clip_gradients(self) -> float:
        shards = [p.grad.to_local() for p in self.model.parameters() if isinstance(p.grad, DTensor)]
        norm = global_norm(shards, self.operators)
        limit = self.config.trainer.clip_grad or math.inf
        clip_gradients(shards, limit, norm, self.operators)
        return norm

    def _step_optimizer(self) -> None:
        take_step(self.optimizer, self.operators)
        self.optimizer.zero_grad(set_to_none=True)

    def recording(self, recorder: Recorder) -> AbstractContextManager[list[list[Call]]]:
        return recording(self.model, recorder)

    def weight_buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        return gather_buckets(self.model, self.dtype, max_bytes)

    def _write_tensors(self, directory: Path) -> None:
        write_tensors(directory, self.model, self.optimizer)

    def _read_tensors(self, directory: Path) -> None:
        read_tensors(directory, self.model, self.optimizer)


def _free_gathered_weights(model: PolicyModel) -> None:
    """After a forward pass, FSDP2 keeps the root's weights gathered for a backward pass to come."""
    assert isinstance(model, FSDPModule)
    model.reshard()
