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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from onpolicy.config.tools import ExplainConfig
from onpolicy.contract import KINDS, OUTSIDE, NumericsContract
from onpolicy.errors import EngineError
from onpolicy.explain.attribution import ALIGNED, MODEL, STOCK, all_but, difference, model_and
from onpolicy.models.hf_config import load_config
from onpolicy.outputs.directory import versions
from onpolicy.run.commands.verify import requests_of
from onpolicy.run.commands.verify_inputs import longest_prompt, make_prompts, make_train_config
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.cluster_engines import MakeEngines
from onpolicy.run.launch.contracts import contract_for, require_attention
from onpolicy.run.launch.engine_specs import make_rollout_group
from onpolicy.run.launch.shared_directories import require_shared_by_servers
from onpolicy.trajectory import Completion
from onpolicy.types import Request

if TYPE_CHECKING:
    from onpolicy.rollout.sglang import SglangGroup

logger = logging.getLogger(__name__)

Result = dict[str, Any]


def attribute(config: ExplainConfig, make_engines: MakeEngines = EnginePair) -> Result:
    """One row for each contract: all aligned, all stock, each kind or layer alone, and all but each."""
    assert config.attribution is not None
    hf_config = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
    longest = longest_prompt(config, hf_config)
    train_config = make_train_config(config, longest)
    aligned = contract_for(train_config, hf_config, aligned=True)
    require_attention(aligned.shapes, ("model",))
    stock = contract_for(train_config, hf_config, aligned=False)
    requests = requests_of(make_prompts(config, hf_config.vocab_size, longest), config, 0)
    run_dir = Path(config.run_dir).absolute()
    run_dir.mkdir(parents=True, exist_ok=True)
    tokens = run_dir / "tokens.json"
    tokens.unlink(missing_ok=True)
    engines = make_engines(
        train_config,
        hf_config,
        aligned,
        run_dir,
        longest_sequence=longest + config.max_new_tokens,
        make_rollout=partial(make_rollout_group, tokens=str(tokens)),
    )
    rollout: SglangGroup = engines.rollout  # type: ignore[assignment]
    require_shared_by_servers(f"--run-dir={config.run_dir}", run_dir, rollout.servers)
    try:
        engines.start()
        parts = parts_of(aligned, config.attribution, hf_config.num_hidden_layers)
        contracts = list(contracts_of(aligned, stock, parts))
        rows = list(Rows(engines, requests, config.temperature, tokens).of(contracts))
    finally:
        engines.stop()
    contract = {**json.loads(aligned.to_json()), "fingerprint": aligned.fingerprint}
    return {"by": config.attribution, "rows": rows, "versions": versions(), "contract": contract}


Part = tuple[str, NumericsContract, NumericsContract]
"""A kind or a layer: its name, a contract that aligns it alone, one that aligns all but it."""


def parts_of(aligned: NumericsContract, by: Literal["kinds", "layers"], layers: int) -> list[Part]:
    """The kinds of operators that the model has, `model` apart; or its layers and what is OUTSIDE."""
    return _kinds(aligned) if by == "kinds" else _layers(aligned, layers)


def _kinds(aligned: NumericsContract) -> list[Part]:
    kinds = [kind for kind in KINDS if kind != "experts" or aligned.shapes.experts]
    return [
        (
            kind,
            replace(aligned, kinds=("model", kind)),
            replace(aligned, kinds=tuple(k for k in kinds if k != kind)),
        )
        for kind in kinds
        if kind != "model"
    ]


def _layers(aligned: NumericsContract, count: int) -> list[Part]:
    layers = [*map(str, range(count)), OUTSIDE]
    return [
        (
            layer if layer == OUTSIDE else f"layer {layer}",
            replace(aligned, layers=(layer,)),
            replace(aligned, layers=tuple(other for other in layers if other != layer)),
        )
        for layer in layers
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
        self,
        engines: EnginePair,
        requests: Sequence[Request],
        temperature: float,
        tokens: Path,
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
