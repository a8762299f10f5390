"""How much of the mismatch each kind of operator, or each layer, causes: the same tokens under many
contracts.

The aligned engines sample. Every later server is given those tokens (`sglang_patches/given_tokens.py`):
it prefills in chunks, finds prefixes in its cache and decodes in batches as it does, and the trainer
scores the same tokens, packed, under the same contract. So the rows of the table differ in what the
engines run on, and in nothing else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from onpolicy.config.tools import ExplainConfig
from onpolicy.contract import KINDS, OUTSIDE, NumericsContract
from onpolicy.errors import EngineError
from onpolicy.explain.effects import ALIGNED, MODEL, STOCK, all_but, difference, model_and
from onpolicy.explain.inputs import Inputs, Result, told
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.cluster_engines import MakeEngines
from onpolicy.run.launch.contracts import require_attention
from onpolicy.trajectory import Completion
from onpolicy.types import Request

logger = logging.getLogger(__name__)

GIVEN_TOKENS = "sglang_patches.given_tokens:GivenTokens"
"""The extension of a server that answers with the tokens of a file."""


def attribute(config: ExplainConfig, make_engines: MakeEngines = EnginePair) -> Result:
    """One row for each contract: all aligned, all stock, each kind or layer alone, and all but each."""
    assert config.attribution is not None
    inputs = Inputs.of(config)
    aligned, stock = inputs.contract(aligned=True), inputs.contract(aligned=False)
    require_attention(aligned.shapes, ("model",))
    parts = parts_of(aligned, config.attribution, inputs.hf_config.num_hidden_layers)
    contracts = list(contracts_of(aligned, stock, parts))
    tokens = inputs.directory / "tokens.json"
    tokens.unlink(missing_ok=True)
    with inputs.engines(aligned, {GIVEN_TOKENS: tokens}, make_engines) as engines:
        rows = list(Rows(engines, inputs.requests, config.temperature, tokens).of(contracts))
    return {"by": config.attribution, "rows": rows, **told(aligned)}


Part = tuple[str, NumericsContract, NumericsContract]
"""A kind or a layer: its name, a contract that aligns it alone, one that aligns all but it."""


def parts_of(aligned: NumericsContract, by: Literal["kinds", "layers"], layers: int) -> list[Part]:
    """The kinds of operators that the model has, `model` apart; or its layers and what is OUTSIDE."""
    parts, always = [*map(str, range(layers)), OUTSIDE], tuple[str, ...]()
    if by == "kinds":
        parts, always = list(KINDS), ("model",)
        if not aligned.shapes.experts:
            parts.remove("experts")

    def aligning(*only: str) -> NumericsContract:
        return replace(aligned, kinds=only) if by == "kinds" else replace(aligned, layers=only)

    return [
        (
            f"layer {part}" if part.isdecimal() else part,
            aligning(*always, part),
            aligning(*(other for other in parts if other != part)),
        )
        for part in parts
        if part not in always
    ]


def contracts_of(
    aligned: NumericsContract, stock: NumericsContract, parts: Sequence[Part]
) -> Iterator[tuple[str, NumericsContract]]:
    """The rows' names and contracts; the aligned one is first."""
    yield ALIGNED, aligned
    yield STOCK, stock
    yield MODEL, replace(aligned, kinds=("model",))
    yield from ((model_and(name), alone) for name, alone, _ in parts)
    yield from ((all_but(name), others) for name, _, others in parts)


class Rows:
    """Engines that are taken from contract to contract, with the weights that the trainer loaded."""

    def __init__(
        self, engines: EnginePair, requests: Sequence[Request], temperature: float, tokens: Path
    ):
        self.engines, self.requests = engines, requests
        self.temperature, self.tokens = temperature, tokens
        self._responses: list[list[int]] | None = None

    def of(self, contracts: Sequence[tuple[str, NumericsContract]]) -> Iterator[Result]:
        """What is measured under each; whoever is first samples the tokens."""
        for number, (name, contract) in enumerate(contracts):
            logger.info("%d of %d: %s", number + 1, len(contracts), name)
            self.engines.use(contract, self.engines.config.fallback)
            self.engines.push_weights(number)
            rollout = self._sample()
            train = self.engines.score(self.requests, rollout, self.temperature)
            row = difference(train, [torch.tensor(c.rollout_log_probs) for c in rollout])
            logger.info("%s: k3 %.2g", name, row["k3_kl_mean"])
            aligned = {"kinds": list(contract.kinds), "layers": list(contract.layers)}
            yield {"name": name, **aligned, **row}

    def _sample(self) -> list[Completion]:
        """The first time as drawn, and from then on the same tokens. Raises EngineError if not."""
        completions = self.engines.generate(self.requests)
        responses = [completion.response_ids for completion in completions]
        if self._responses is None:
            self._responses = responses
            prompts = [request.prompt_ids for request in self.requests]
            self.tokens.write_text(json.dumps(list(zip(prompts, responses, strict=True))))
        if responses != self._responses:
            raise EngineError(
                "a server did not answer with the tokens that it was given, so its log-probabilities "
                "are of others. Two prompts may be the same: give a larger --max-prompt-len."
            )
        return completions
