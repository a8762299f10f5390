"""Whole runs of a real trainer on a tiny model, whose engines in memory sample from the same model."""

from functools import partial

import torch
from torch import Tensor

from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import empty_policy
from onpolicy.ops import AttentionLayout, make_operators
from onpolicy.ops.draws import draw
from onpolicy.ops.kept_tokens import WHOLE, Cut, left, packed, within
from onpolicy.rollout.prompt_order import PromptSource
from onpolicy.run.engines import trainer_here
from onpolicy.run.launch.inputs import Inputs, make_contract
from onpolicy.run.loop import train
from onpolicy.run.run import Run
from onpolicy.types import Prompt
from tests.support.checked_once import digests_of
from tests.support.engines_in_memory import Engine, Host, Memory
from tests.support.run_in_memory import ScorerInMemory, even_tokens
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

    def __init__(self, contract, policy):
        super().__init__(contract)
        self.weights, self._policy, self._num_in_policy = {}, policy, 0

    def self_check(self):
        return digests_of(self.contract, 1)

    def score(self, context, temperature):
        scale = torch.full((1, 1), temperature)
        return self._policy.operators.log_softmax(self.logits(context), scale)[0]

    def cut(self, context, scores, params):
        """As an engine under an aligned contract; others here heed no filter."""
        cut = Cut.of(params.top_k, params.top_p, params.min_p)
        if cut is None or not self.contract.is_aligned:
            return scores, WHOLE
        operators = self._policy.operators
        logits, temperature = self.logits(context), torch.full((1, 1), params.temperature)
        kept = left(operators, logits, temperature, None, cut)
        assert kept is not None
        return operators.log_softmax(within(logits, kept), temperature)[0], packed(kept)[0]

    def draw(self, scores, seed, place):
        """By the sampler that engines and trainers have."""
        operators = self._policy.operators
        numbers = operators.uniform(torch.tensor([seed]), torch.tensor([place - 1]))
        return int(draw(operators, scores[None], numbers))

    @torch.no_grad()
    def logits(self, context):
        """[1, V] of the token after `context`."""
        policy, operators = self._policy, self._policy.operators
        if self._num_in_policy != len(self.loaded):
            policy.causal_lm.load_state_dict(self.weights, strict=False, assign=True)
            policy.causal_lm.tie_weights()
            self._num_in_policy = len(self.loaded)
        layout = AttentionLayout.packed((len(context),), "cpu")

        def attention(q, k, v, *how):
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

    def __init__(self, hf_config):
        super().__init__()
        self._hf_config = hf_config

    def new_engine(self, spec, port, log_file):
        operators = make_operators(spec.contract, 1)
        policy = empty_policy(self._hf_config, operators, adapter=spec.contract.adapter)

        class PolicyEngine(Engine):
            vocab_size = self._hf_config.vocab_size

            def new_memory(self):
                return PolicyMemory(spec.contract, policy)

        return PolicyEngine(spec, port, log_file)


def inputs_of(config):
    """Raises ConfigError for what the flags do not tell alone: contracts and corrections."""
    hf_config = load_config(config.model.hf_checkpoint)
    contract, ladder = make_contract(config, hf_config)
    return Inputs(
        hf_config=hf_config,
        contract=contract,
        ladder=ladder,
        tokenizer=make_tokenizer(),
        prompts=PromptSource(PROMPTS, config.seed, config.data.shuffle),
        eval_sets={},
        stop_token_ids=(END, *range(100, hf_config.vocab_size)),  # so that lengths differ
    )


class KeptRun(Run):
    """Keeps what it has trained."""

    weights: dict[str, Tensor]

    def summary(self):
        buckets = self.engines.trainer.policy.weight_buckets(1 << 30)
        type(self).weights = {name: x.clone() for bucket in buckets for name, x in bucket}
        return super().summary()


def run_policy(config, reward=even_tokens):
    """What a run ends with, and the policy's weights then."""
    inputs = inputs_of(config)
    make = partial(
        KeptRun,
        make_engines=pair_maker(PolicyHost(inputs.hf_config), trainer_here),
        make_scorer=lambda config: ScorerInMemory(reward),
    )
    return train(config, inputs, make), KeptRun.weights
