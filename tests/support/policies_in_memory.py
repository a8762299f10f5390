"""Whole runs of a real trainer on a tiny model, whose engines in memory sample from the same model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PolicyModel, empty_policy
from onpolicy.ops import AttentionLayout, make_operators
from onpolicy.ops.cuts import Cut, left, within
from onpolicy.ops.draws import draw
from onpolicy.ops.kept_tokens import WHOLE, packed
from onpolicy.outputs.totals import RunSummary
from onpolicy.rollout.prompt_order import PromptSource
from onpolicy.run.engines import trainer_here
from onpolicy.run.launch.inputs import Inputs, make_ladder
from onpolicy.run.loop import train
from onpolicy.run.run import Run
from onpolicy.types import Prompt, SamplingParams
from tests.support.checked_once import digests_of
from tests.support.engines_in_memory import Engine, Host, Memory
from tests.support.run_in_memory import Reward, ScorerInMemory, even_tokens
from tests.support.tiny import make_tokenizer
from tests.support.tiny_policy import END
from tests.support.trainer_in_memory import pair_maker

PROMPTS = [Prompt(index=i, prompt_ids=[i + 2, 9 - i], label="x", text="ab") for i in range(5)]
SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
"""Of a checkpoint that `make_checkpoint` makes, for many runs."""

STOCK_SCALE = 1 + 2**-9
"""Of logits under a stock contract."""


class PolicyMemory(Memory):
    """Samples from the Hugging Face model of the checkpoint, one whole context at a time.

    Under a stock contract it differs from the trainer.
    """

    can_be_greedy = False  # so that rewards differ under --rollout-top-k 1 too

    def __init__(self, contract: NumericsContract, policy: PolicyModel):
        super().__init__(contract)
        self.weights, self._policy, self._num_in_policy = {}, policy, 0

    def self_check(self) -> dict[str, str]:
        return digests_of(self.contract, 1)

    def score(self, context: list[int], temperature: float) -> Tensor:
        scale = torch.full((1, 1), temperature)
        return self._policy.operators.log_softmax(self.logits(context), scale)[0]

    def cut(
        self, context: list[int], scores: Tensor, params: SamplingParams
    ) -> tuple[Tensor, bytes]:
        """As an engine under an aligned contract; others here heed no filter."""
        cut = Cut.of(params.top_k, params.top_p, params.min_p)
        if cut is None or not self.contract.is_aligned:
            return scores, WHOLE
        operators = self._policy.operators
        logits, temperature = self.logits(context), torch.full((1, 1), params.temperature)
        kept = left(operators, logits, temperature, None, cut)
        assert kept is not None
        return operators.log_softmax(within(logits, kept), temperature)[0], packed(kept)[0]

    def draw(self, scores: Tensor, seed: int, place: int) -> int:
        """By the sampler that engines and trainers have."""
        operators = self._policy.operators
        numbers = operators.uniform(torch.tensor([seed]), torch.tensor([place - 1]))
        return int(draw(operators, scores[None], numbers))

    @torch.no_grad()
    def logits(self, context: list[int]) -> Tensor:
        """[1, V] of the token after `context`."""
        policy, operators = self._policy, self._policy.operators
        if self._num_in_policy != len(self.loaded):
            policy.causal_lm.load_state_dict(self.weights, strict=False, assign=True)
            policy.causal_lm.tie_weights()
            self._num_in_policy = len(self.loaded)
        layout = AttentionLayout.packed((len(context),), "cpu")

        def attention(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
            return operators.attention(q, k, v, layout, *how)

        hidden = policy.causal_lm.base_model(
            input_ids=torch.tensor([context]),
            position_ids=torch.arange(len(context))[None],
            use_cache=False,
            attention_function=attention,
        )[0][0, -1:]
        logits = policy.head().logits(hidden)
        return logits if self.contract.is_aligned else logits.float() * STOCK_SCALE


class PolicyHost(Host):
    """Where such engines run."""

    def __init__(self, hf_config: PretrainedConfig):
        super().__init__()
        self._hf_config = hf_config

    def new_engine(self, spec: Any, port: int, log_file: Path) -> Engine:
        operators = make_operators(spec.contract, 1)
        policy = empty_policy(self._hf_config, operators, adapter=spec.contract.adapter)

        class PolicyEngine(Engine):
            vocab_size = self._hf_config.vocab_size

            def new_memory(self) -> Memory:
                return PolicyMemory(spec.contract, policy)

        return PolicyEngine(spec, port, log_file)


def inputs_of(config: TrainConfig) -> Inputs:
    """Raises ConfigError for what the flags do not tell alone: contracts and corrections."""
    hf_config = load_config(config.model.hf_checkpoint)
    return Inputs(
        hf_config=hf_config,
        ladder=make_ladder(config, hf_config),
        tokenizer=make_tokenizer(),
        prompts=PromptSource(PROMPTS, config.seed, config.data.shuffle),
        eval_sets={},
        stop_token_ids=(END, *range(100, hf_config.vocab_size)),  # so that lengths differ
    )


class KeptRun(Run):
    """Keeps what it has trained."""

    weights: dict[str, Tensor]

    def summary(self) -> RunSummary:
        buckets = self.engines.trainer.policy.weight_buckets(1 << 30)  # type: ignore[attr-defined]
        type(self).weights = {name: x.clone() for bucket in buckets for name, x in bucket}
        return super().summary()


def run_policy(
    config: TrainConfig, reward: Reward = even_tokens
) -> tuple[RunSummary, dict[str, Tensor]]:
    """What a run ends with, and the policy's weights then."""
    inputs = inputs_of(config)
    make: Any = partial(
        KeptRun,
        make_engines=pair_maker(PolicyHost(inputs.hf_config), trainer_here),
        make_scorer=lambda config: ScorerInMemory(reward),
    )
    return train(config, inputs, make), KeptRun.weights
