"""Parsing of a server's answers into completions, and errors for answers that are wrong."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onpolicy.errors import ContractError, EngineError
from onpolicy.trajectory import UNPUSHED, Completion, FinishReason, Span
from onpolicy.types import Request


def was_aborted(answer: Any) -> bool:
    """Return whether the server gave up the request, as it does when it shuts down."""
    reason = answer.get("meta_info", {}).get("finish_reason") if isinstance(answer, dict) else None
    return isinstance(reason, dict) and reason.get("type") == "abort"


def completion_of(answer: Any, status: int, request: Request, url: str) -> Completion:
    """Return the completion in an answer.

    Raise ContractError if the server refused the request, EngineError if the answer is unusable.
    """
    if status == 404:
        raise ContractError(
            f"{url}: HTTP 404 for a run's requests: the server has the plug-in of another version. "
            "Start it by `onpolicy serve`, of the same version as the run."
        )
    if status != 200 or "output_ids" not in answer:
        raise ContractError(f"{url}/generate refused a request (HTTP {status}): {answer}")
    meta, response_ids = answer["meta_info"], _numbers(answer["output_ids"], "<i4")
    values, tokens = meta["output_token_logprobs"]
    log_probs = _numbers(values, "<f8")
    if _numbers(tokens, "<i4") != response_ids:
        raise EngineError(
            f"{url}: {len(response_ids)} tokens, but log-probabilities for {len(log_probs)} of them. "
            "Training needs one for each; use SGLang from the supported range."
        )
    if not all(map(math.isfinite, log_probs)):
        bad = next(i for i, x in enumerate(log_probs) if not math.isfinite(x))
        raise EngineError(
            f"{url}: log_prob={log_probs[bad]} at response position {bad}. The weights have likely "
            "diverged; resume from an earlier checkpoint with a lower --lr."
        )
    completion = Completion(
        response_ids=response_ids,
        rollout_log_probs=log_probs,
        finish_reason=FinishReason(meta["finish_reason"]["type"]),
        weight_version=_version(meta.get("weight_version")),
        num_cached_tokens=int(meta.get("cached_tokens") or 0),
        routed_experts=_routed_experts(meta, request, url) if response_ids else None,
        kept_tokens=_kept_tokens(meta, request, len(response_ids), url),
        entropy=_entropy(meta, request, len(response_ids), url),
        spans=tuple(
            Span(version=_version(span["version"]), start=int(span["start"]), end=int(span["end"]))
            for span in meta.get("weight_versions") or ()
        ),
    )
    if not was_aborted(answer):
        return completion
    # An abort does not say whether the last token ends the response, so drop that token.
    return completion.until(max(len(response_ids) - 1, 0), completion.finish_reason)


def _numbers(encoded: str, dtype: str) -> list[Any]:
    """Decode an array that `sglang_patches/generate_each.py` put into base64."""
    found: list[Any] = np.frombuffer(base64.b64decode(encoded), dtype=dtype).tolist()
    return found


def _kept_tokens(meta: dict[str, Any], request: Request, count: int, url: str) -> list[bytes]:
    """Return for each of `count` tokens the set it was drawn from, as an engine with our sampler
    reports."""
    if "kept_tokens" not in meta and request.params.grammar is not None and count:
        raise ContractError(
            f"{url}: an answer within a grammar that does not say what its tokens were drawn from, so "
            "it cannot be trained on. Start the server with --true-on-policy-mode."
        )
    if not request.params.is_cut or "kept_tokens" not in meta:
        return []
    sets = {text: base64.b64decode(text) for text in set(meta["kept_tokens"])}
    kept = [sets[text] for text in meta["kept_tokens"]]  # equal ones are held once
    if len(kept) != count:
        raise EngineError(
            f"{url}: {count} tokens, and what {len(kept)} of them were drawn from. "
            "Training needs it of each; use SGLang from the supported range."
        )
    return kept


def _entropy(meta: dict[str, Any], request: Request, count: int, url: str) -> list[float]:
    """Return the entropy of each token's distribution; an empty list if it was not requested."""
    if not request.params.return_entropy:
        return []
    entropy: list[float] = meta.get("entropy") or []
    if len(entropy) != count or None in entropy:
        raise EngineError(
            f"{url}: {count} tokens, and the entropies of {len(entropy)} of them, which "
            "--top-entropy-quantile needs. Start the server by `onpolicy serve`, of the same version as "
            "the run, or leave that flag out."
        )
    return entropy


def _version(said: object) -> int:
    """Return the number of a push; SGLang keeps a text, and `default` for weights that were never
    pushed."""
    text = str(said)
    return int(text) if text.isdecimal() else UNPUSHED


def _routed_experts(meta: dict[str, Any], request: Request, url: str) -> NDArray[np.int32] | None:
    """Return the experts of each token, if they were requested and are the ones used in sampling.

    SGLang recomputes a request that was retracted, maybe by other experts than its first tokens
    were sampled with, and returns the later ones; the result is None then.
    """
    if not request.params.return_routed_experts or meta.get("num_retractions"):
        return None
    encoded = meta.get("routed_experts")
    if encoded is None:
        raise EngineError(
            f"{url}: a response without its routed experts, which --use-rollout-routing-replay needs. "
            "Start the server with --sglang-enable-return-routed-experts, for a model with experts."
        )
    tokens = int(meta["prompt_tokens"]) + int(meta["completion_tokens"]) - 1
    return np.frombuffer(base64.b64decode(encoded), dtype=np.int32).reshape(tokens, -1)
