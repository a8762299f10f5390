"""The microscope: the same tokens through both engines, everything recorded, and the first difference.

One pass keeps digests. If something differs, the tokens are run again and the tensors of one call, the
suspected one, are kept on either side; then the operator runs alone on them.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onpolicy.config.tools import ExplainConfig
from onpolicy.contract import NumericsContract
from onpolicy.explain.proof import prove
from onpolicy.explain.source import Source, count_sites, first_source
from onpolicy.models.hf_config import load_config
from onpolicy.ops import make_operators
from onpolicy.outputs.directory import versions
from onpolicy.parity import ParityCounts, compare_log_probs
from onpolicy.run.cases import case_request, compare_weights, read_case
from onpolicy.run.commands.verify import requests_of
from onpolicy.run.commands.verify_inputs import longest_prompt, make_prompts, make_train_config
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.cluster_engines import MakeEngines
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import make_rollout_group
from onpolicy.run.launch.shared_directories import require_shared_by_servers
from onpolicy.taps.evidence import clear_evidence, read_evidence
from onpolicy.taps.recorder import HEAD, Site
from onpolicy.taps.recording import SUSPECT, Recording, read_calls
from onpolicy.taps.rows import prefix_keys
from onpolicy.train.recording import Recorded, Wanted
from onpolicy.trajectory import Completion
from onpolicy.types import Request

if TYPE_CHECKING:  # it imports Ray, which a session prepares
    from onpolicy.rollout.sglang import SglangGroup

logger = logging.getLogger(__name__)

Result = dict[str, Any]

LOG_SOFTMAX: Site = (HEAD, "log_softmax", 0)
"""What is left when a token's logits agree and its log-probability does not."""


def explain(config: ExplainConfig, make_engines: MakeEngines = EnginePair) -> Result:
    """Start both engines, record them, and say where they part."""
    hf_config = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
    longest = longest_prompt(config, hf_config)
    train_config = make_train_config(config, longest)
    contract = contract_for(train_config, hf_config, aligned=config.true_on_policy_mode)
    requests = requests_of(make_prompts(config, hf_config.vocab_size, longest), config, 0)
    if config.case:
        requests = [case_request(Path(config.case))]
    directory = _empty(Path(config.run_dir).absolute() / "taps")
    engines = make_engines(
        train_config,
        hf_config,
        contract,
        Path(config.run_dir),
        longest_sequence=max(len(r.prompt_ids) + r.params.max_new_tokens for r in requests),
        make_rollout=partial(make_rollout_group, taps=str(directory)),
    )
    rollout: SglangGroup = engines.rollout  # type: ignore[assignment]
    require_shared_by_servers(f"--run-dir={config.run_dir}", directory, rollout.servers)
    try:
        engines.start()
        logger.info("pushing the trainer's weights")
        engines.push_weights(0)
        if config.case:
            compare_weights(read_case(Path(config.case)), engines.weight_digest, config)
        result = Microscope(engines, directory, requests, config.temperature).look()
    finally:
        engines.stop()
        shutil.rmtree(directory, ignore_errors=True)
    return {**result, "versions": versions(), "contract": _told(contract)}


def _told(contract: NumericsContract) -> Result:
    return {**json.loads(contract.to_json()), "fingerprint": contract.fingerprint}


def _empty(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, mode=0o700)
    return directory


class Microscope:
    """Looks at what two engines that hold the same weights make of some requests."""

    def __init__(
        self, engines: EnginePair, directory: Path, requests: Sequence[Request], temperature: float
    ):
        self.engines, self.directory = engines, directory
        self.requests, self.temperature = requests, temperature
        self._wanted = Wanted()

    def look(self) -> Result:
        """Sample, score, compare; and if something differs, find out where it began."""
        completions = self._sample()
        rollout = Recording.of(read_calls(self.directory))
        self._wanted = Wanted(shares=rollout.shares(), ranks=rollout.ranks)
        log_probs, recorded = self._score(completions)
        train = recorded.recordings()
        compared = _compare(completions, log_probs)
        found = self._source(rollout, train, completions, compared)
        sites = [asdict(counts) for counts in count_sites(rollout, train)]
        result = {**_numbers(compared), "first_token": None, "source": None, "proof": None}
        result["only_in_one"] = _only_in_one(rollout, train)
        result |= {"rollout_ranks": rollout.ranks, "train_ranks": len(train)}
        if found is not None:
            number, token, source = found
            if token is not None:
                result["first_token"] = _token(number, token, completions, log_probs)
            result["source"] = {"sequence": number, **asdict(source), "name": source.name}
            result["proof"] = self._prove(source, completions)
        responses = [_response(*pair) for pair in zip(completions, log_probs, strict=True)]
        return {**result, "sites": sites, "responses": responses}

    def _sample(self) -> list[Completion]:
        """With nothing cached and nothing recorded before."""
        if self.engines.config.engine.colocate:
            self.engines.push_again()  # scoring took the servers' memory
        for client in self.engines.rollout.clients:
            client.flush_cache()
        for file in self.directory.glob("*.pass"):
            file.unlink()
        logger.info("sampling %d responses, recorded", len(self.requests))
        return self.engines.generate(self.requests)

    def _score(self, completions: Sequence[Completion]) -> tuple[list[torch.Tensor], Recorded]:
        logger.info("scoring them with the trainer, recorded")
        trainer = self.engines.trainer
        found: list[Recorded] = []

        def log_probs(*of: Any) -> list[torch.Tensor]:
            scores, recorded = trainer.recorded_log_probs(self._wanted, *of)
            found.append(recorded)
            return scores

        scores = self.engines.score(self.requests, completions, self.temperature, log_probs)
        return scores, found[0]

    def _source(
        self,
        rollout: Recording,
        train: Sequence[Recording],
        completions: Sequence[Completion],
        compared: Sequence[tuple[ParityCounts, int | None]],
    ) -> tuple[int, int | None, Source] | None:
        """(sequence, first token that differs, where it began), of the earliest such token.

        If no token differs, rows may: then the first sequence of which some do.
        """
        for number, token in _by_position(compared):
            prompt, response = self.requests[number].prompt_ids, completions[number].response_ids
            end = len(prompt) + (len(response) - 1 if token is None else token)
            keys = prefix_keys([*prompt, *response][:end])
            source = first_source(rollout, train, keys)
            if source is None and token is not None:
                source = _of_log_softmax(keys)
            if source is not None:
                return number, token, source
        return None

    def _prove(self, source: Source, completions: Sequence[Completion]) -> Result | None:
        """The operator alone; None where there is none, or its call did not come again."""
        if source.cause in ("not computed", "between operators") or source.site == LOG_SOFTMAX:
            return None
        logger.info("running the tokens again, to keep the tensors of the %s", source.name)
        clear_evidence(self.directory)
        wanted = json.dumps({"site": source.site, "key": source.key})
        (self.directory / SUSPECT).write_text(wanted)
        rank = source.ranks[0]
        suspect = source.site, source.key, rank
        self._wanted = replace(self._wanted, suspect=suspect, of_rank=source.train_ranks[0])
        self._sample()
        ours, theirs = self._score(completions)[1], read_evidence(self.directory)
        if rank not in theirs or ours.evidence is None:
            return None
        operators = make_operators(self.engines.contract)
        proof = prove(theirs, ours.evidence, ours.objects, operators, rank)
        return asdict(proof)


def _only_in_one(rollout: Recording, train: Sequence[Recording]) -> list[str]:
    """Sites that one side lacks, or of which a rank has what is no part of the trainer's."""
    ours: dict[Site, set[int]] = {}
    for recording in train:
        for site, by_rank in recording.items():
            ours.setdefault(site, set()).update(by_rank)
    sites = set(rollout) ^ set(ours)
    sites |= {site for site in set(rollout) & set(ours) if rollout[site].keys() - ours[site]}
    return sorted({f"{operator} of {module}" for module, operator, _ in sites})


def _compare(
    completions: Sequence[Completion], log_probs: Sequence[torch.Tensor]
) -> list[tuple[ParityCounts, int | None]]:
    return [
        compare_log_probs(ours, torch.tensor(completion.rollout_log_probs))
        for completion, ours in zip(completions, log_probs, strict=True)
    ]


def _by_position(
    compared: Sequence[tuple[ParityCounts, int | None]],
) -> Iterator[tuple[int, int | None]]:
    """(sequence, first token that differs), earliest token first, those without one last."""
    tokens = [(number, token) for number, (_, token) in enumerate(compared)]
    yield from sorted(tokens, key=lambda pair: (pair[1] is None, pair[1] or 0))


def _numbers(compared: Sequence[tuple[ParityCounts, int | None]]) -> Result:
    return sum((counts for counts, _ in compared), ParityCounts()).report()


def _token(
    number: int, token: int, completions: Sequence[Completion], log_probs: Sequence[torch.Tensor]
) -> Result:
    return {
        "sequence": number,
        "response_position": token,
        "rollout_log_prob": completions[number].rollout_log_probs[token],
        "train_log_prob": float(log_probs[number][token]),
    }


def _response(completion: Completion, log_probs: torch.Tensor) -> Result:
    return {
        "tokens": completion.response_ids,
        "rollout_log_probs": completion.rollout_log_probs,
        "train_log_probs": log_probs.tolist(),
    }


def _of_log_softmax(keys: Sequence[int]) -> Source:
    return Source(
        cause="operator",
        site=LOG_SOFTMAX,
        before=(HEAD, "linear", 0),
        position=len(keys) - 1,
        key=keys[-1],
        ranks=(0,),
        train_ranks=(0,),
        rollout_shape=(),
        train_shape=(),
    )
