"""How both training engines score sequences under a contract; the forward pass is an engine's own."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.models.policy import PackedTokens
from onpolicy.ops import Operators, make_operators
from onpolicy.ops.checks.gradient_check import check_gradients
from onpolicy.ops.checks.self_check import self_check
from onpolicy.ops.partial import aligned_side
from onpolicy.taps.recorder import Call, Recorder
from onpolicy.train import distributed
from onpolicy.train.packing import pack
from onpolicy.train.recording import Recorded, Wanted
from onpolicy.train.weight_outlet import WeightOutlet

logger = logging.getLogger(__name__)


class PolicyScorer(WeightOutlet):
    """Log-probabilities by the operators of a contract, which are checked first.

    An engine scores packed batches, and puts other operators into its models.
    """

    def __init__(self, config: TrainConfig, contract: NumericsContract, num_threads: int):
        super().__init__(config)
        self.num_threads = num_threads
        torch.manual_seed(config.seed)
        self.device = distributed.device(contract.device)
        self.dtype: torch.dtype = getattr(torch, contract.dtype)
        self._use_contract(contract)

    def _use_contract(self, contract: NumericsContract) -> None:
        self.contract = contract
        self.operators = make_operators(contract, self.num_threads)
        self.self_check = {}
        if contract.shares_model:
            logger.info("checking the trainer's operators at the model's shapes")
            longest = self.config.trainer.max_tokens_per_gpu
            aligned = aligned_side(self.operators)
            self.self_check = self_check(aligned, contract, longest)
            check_gradients(aligned, contract)

    @abstractmethod
    def _put_operators(self, operators: Operators) -> None:
        """Let every model compute with other operators from now on."""

    @abstractmethod
    def _score(self, batches: Sequence[PackedTokens], *, reference: bool = False) -> list[Tensor]:
        """Log-probabilities without gradient by the policy or the reference: float32 [R] each."""

    @abstractmethod
    def recording(self, recorder: Recorder) -> AbstractContextManager[list[list[Call]]]:
        """Record every forward pass meanwhile; yields what grows by the calls of each."""

    def log_probs(
        self, sequences: Sequence[list[int]], prompt_lens: Sequence[int], temperature: float
    ) -> list[Tensor]:
        lens = [len(s) for s in sequences]
        max_tokens = self.config.trainer.max_tokens_per_gpu
        plan = pack(lens, distributed.data_size(), max_tokens)[distributed.data_rank()]
        batches = [
            PackedTokens.pack(
                [sequences[i] for i in indices] or [[0, 0]],
                [prompt_lens[i] for i in indices] or [1],
                temperature,
                self.device,
            )
            for indices in plan
        ]
        mine: dict[int, Tensor] = {}
        for indices, scores in zip(plan, self._score(batches), strict=True):
            responses = [lens[i] - prompt_lens[i] for i in indices]
            parts = scores[: sum(responses)].cpu().split(responses)
            mine.update(zip(indices, parts, strict=True))
        results = {i: part for ours in distributed.gather_data(mine) for i, part in ours.items()}
        return [results[i] for i in range(len(sequences))]

    def recorded_log_probs(
        self,
        wanted: Wanted,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        temperature: float,
    ) -> tuple[list[Tensor], Recorded]:
        """`log_probs`, and what this rank's operators made meanwhile."""
        recorder = wanted.recorder()
        with self.recording(recorder) as passes:
            scores = self.log_probs(sequences, prompt_lens, temperature)
        evidence, objects = recorder.evidence, recorder.objects
        return scores, Recorded(passes=passes, evidence=evidence, objects=objects)
