"""The Megatron-core training engine: its schedules, gradient buffers and optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor, nn

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ParityError
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PackedTokens
from onpolicy.ops import Operators
from onpolicy.taps.recorder import Call, Recorder
from onpolicy.train import distributed
from onpolicy.train.batch import WeighedBatch
from onpolicy.train.loss import policy_loss
from onpolicy.train.megatron import stages
from onpolicy.train.megatron.gradients import OrderedGradients, orders_gradients
from onpolicy.train.megatron.layout import MegatronLayout
from onpolicy.train.megatron.model import build_model
from onpolicy.train.megatron.optimizer import (
    gradient_norm,
    make_optimizer,
    use_settings,
    with_gradients,
)
from onpolicy.train.megatron.schedule import accumulate_gradients, score
from onpolicy.train.megatron.state import read_tensors, write_tensors
from onpolicy.train.megatron.taps import recording
from onpolicy.train.megatron.weights import export_buckets, load_hf_weights
from onpolicy.train.parity_gate import ParityGate
from onpolicy.train.policy_trainer import PolicyTrainer
from onpolicy.weights.digest import WeightBucket


class MegatronTrainer(PolicyTrainer):
    """Tensor, sequence, pipeline, context, expert and data parallelism by Megatron-core.

    Every rank of a data-parallel share ends a verb with the same log-probabilities and metrics, so
    that what follows them (corrections, parity check) is the same on all of them.
    """

    optimizer: MegatronOptimizer

    def __init__(
        self,
        config: TrainConfig,
        contract: NumericsContract,
        num_threads: int,
        layout: MegatronLayout,
    ):
        super().__init__(config, contract, num_threads)
        self.layout = layout
        self.model = with_gradients(self._load_model(config.model.hf_checkpoint), config)
        self.ordered: OrderedGradients | None = None
        if config.is_rank_invariant and orders_gradients(layout):
            self.ordered = OrderedGradients(self.model)
        self.reference: nn.Module | None = None
        algorithm = config.algorithm
        if algorithm.use_kl_loss:
            self.reference = self._load_model(
                algorithm.ref_checkpoint or config.model.hf_checkpoint
            )
        self.optimizer = make_optimizer(self.model, config, self.dtype)
        use_settings(self.optimizer, config)

    def _load_model(self, path: str) -> nn.Module:
        trust = self.config.model.trust_remote_code
        hf_config = load_config(path, trust, context=self.contract.context)
        model = build_model(hf_config, self.contract, self.operators, self.layout, self.device)
        load_hf_weights(model, path)
        return model

    def _put_operators(self, operators: Operators) -> None:
        for model in (self.model, self.reference):
            if model is not None:
                stages.config_of(model).operators = operators

    def _score(self, batches: Sequence[PackedTokens], *, reference: bool = False) -> list[Tensor]:
        model = self.reference if reference else self.model
        assert model is not None
        return [log_probs for log_probs, _ in score(model, batches)]

    def _accumulate_gradients(
        self, micro_batches: Sequence[WeighedBatch], gate: ParityGate | None
    ) -> tuple[dict[str, float], list[Tensor]]:
        packed = [batch.packed for batch in micro_batches]
        if gate is not None and stages.count() > 1:
            # A pipeline runs backward passes before the last forward pass, and only its last stage
            # knows log-probabilities; so they are compared before, by a forward pass of their own.
            for log_probs, batch in zip(self._score(packed), micro_batches, strict=True):
                gate.check(log_probs, batch)
            gate = None
        metrics: list[dict[str, float]] = []
        train_log_probs: list[Tensor] = []

        def loss(number: int, log_probs: Tensor, entropy: Tensor) -> Tensor:
            batch = micro_batches[number]
            if self.ordered is not None and number:
                self.ordered.take()  # the one before, whose backward pass is over
            train_log_probs.append(log_probs.detach())
            if gate is not None:
                gate.check(log_probs, batch)
            total, found = policy_loss(log_probs, batch, self.loss_settings)
            found["train/entropy"] = (entropy * batch.shares).sum()
            metrics.append({name: float(value) for name, value in found.items()})
            return total

        self.model.zero_grad_buffer()
        if self.ordered is not None:
            self.ordered.start()
        try:
            accumulate_gradients(self.model, packed, loss)
        except ParityError:
            self.model.zero_grad_buffer()
            raise
        sizes = [len(batch.mask) for batch in micro_batches]
        shared = stages.share_vectors(train_log_probs, sizes, self.device)
        return distributed.sum_micro_batches(stages.share_object(metrics)), shared

    def _clip_gradients(self) -> float:
        self.optimizer.prepare_grads()
        norm = gradient_norm(self.optimizer, self.operators)
        limit = self.config.trainer.clip_grad
        for part in self.optimizer.chained_optimizers:
            if limit and (parameters := part.get_parameters()):
                clip_grad_by_total_norm_fp32(parameters, limit, norm)
        return norm

    def _step_optimizer(self) -> None:
        self.optimizer.step_with_ready_grads()
        self.optimizer.zero_grad()

    def recording(self, recorder: Recorder) -> AbstractContextManager[list[list[Call]]]:
        return recording(self.model, recorder)

    def weight_buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        return export_buckets(self.model, max_bytes)

    def _write_tensors(self, directory: Path) -> None:
        write_tensors(directory, self.model, self.optimizer)

    def _read_tensors(self, directory: Path) -> None:
        read_tensors(directory, self.model, self.optimizer)
        use_settings(self.optimizer, self.config)
