"""The trainer's model: a Hugging Face causal LM that answers with log-probabilities of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from onpolicy.contract import OperatorShapes
from onpolicy.models.align import ATTENTION_NAME, align_modules
from onpolicy.ops import AttentionLayout, Operators
from onpolicy.ops.log_probs import token_log_probs


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Whole sequences laid end to end, and the tokens whose log-probabilities are asked for.

    T: tokens of all sequences; R: tokens that are asked for.
    """

    tokens: Tensor
    """int64 [T]"""

    positions: Tensor
    """int64 [T]: 0, 1, ... within each sequence"""

    layout: AttentionLayout

    rows: Tensor
    """int64 [R]: rows of `tokens` whose *next* token is asked for"""

    targets: Tensor
    """int64 [R]: those next tokens"""

    temperature: Tensor
    """float32 [R]: divides the logits of each row"""

    @staticmethod
    def pack(
        sequences: list[list[int]],
        prompt_lens: list[int],
        temperature: float,
        device: torch.device | str = "cpu",
    ) -> PackedTokens:
        """Pack sequences of token ids; every token after a sequence's prompt is asked for."""
        lens = tuple(len(s) for s in sequences)
        tokens = torch.tensor([t for s in sequences for t in s])
        positions = torch.cat([torch.arange(n) for n in lens])
        starts = torch.tensor([0, *lens[:-1]]).cumsum(0).tolist()
        rows = torch.cat(
            [
                torch.arange(start + prompt - 1, start + n - 1)
                for start, prompt, n in zip(starts, prompt_lens, lens, strict=True)
            ]
        )
        return PackedTokens(
            tokens=tokens.to(device),
            positions=positions.to(device),
            layout=AttentionLayout.packed(lens, device),
            rows=rows.to(device),
            targets=tokens[rows + 1].to(device),
            temperature=torch.full((len(rows),), temperature, device=device),
        )


class PolicyModel(nn.Module):
    """A causal LM whose forward pass returns log-probabilities, never logits."""

    causal_lm: PreTrainedModel

    def __init__(self, causal_lm: PreTrainedModel, operators: Operators):
        super().__init__()
        self.causal_lm, self.operators = causal_lm, operators

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        count = self.causal_lm.config.num_hidden_layers
        lists = [m for m in self.causal_lm.modules() if isinstance(m, nn.ModuleList)]
        return next(m for m in lists if len(m) == count)

    def forward(self, batch: PackedTokens) -> tuple[Tensor, Tensor]:
        """Returns (log_probs, entropy) of the tokens asked for, both float32 [R]."""

        def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return self.operators.attention(q, k, v, batch.layout, scale)

        hidden = self.causal_lm.base_model(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,
            attention_function=attention,
        )[0][0]
        head = self.causal_lm.get_output_embeddings()
        return token_log_probs(
            self.operators,
            hidden[batch.rows],
            head.weight,
            head.bias,
            batch.targets,
            batch.temperature,
        )


def empty_policy(
    config: PretrainedConfig, operators: Operators, trust_remote_code: bool = False
) -> PolicyModel:
    """The model with parameters on the meta device, buffers in place, operators put in."""
    with init_empty_weights():
        causal_lm = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, trust_remote_code=trust_remote_code
        )
    causal_lm.tie_weights()
    causal_lm.eval()  # no dropout: the rollout has none
    align_modules(causal_lm, operators)
    return PolicyModel(causal_lm, operators)


def operator_shapes(config: PretrainedConfig, trust_remote_code: bool = False) -> OperatorShapes:
    """The sizes at which a model of this configuration calls the operators."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    heads = config.num_attention_heads
    return OperatorShapes(
        linear=tuple(
            sorted({(m.out_features, m.in_features, m.bias is not None) for m in linears})
        ),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        norm=tuple(sorted({m.weight.shape[0] for m in norms})),
        vocab_size=config.vocab_size,
    )
