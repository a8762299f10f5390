"""Talks to one SGLang server: requests, weights, status. Knows HTTP and nothing of processes."""

from __future__ import annotations

import asyncio
import base64
import math
from typing import Any

import aiohttp
import numpy as np
import requests
from numpy.typing import NDArray

from onpolicy.errors import ContractError, EngineError
from onpolicy.types import Completion, FinishReason, Request


class EngineLostError(EngineError):
    """The server does not answer any more; whether it can be started again is its owner's to say."""


_RETRIES = 4
_BACKOFF_SECONDS = 0.25
_CONTROL_TIMEOUT = 600.0


class EngineClient:
    """The server at one URL."""

    def __init__(self, url: str, api_key: str, request_timeout: float):
        self.url, self.request_timeout = url.rstrip("/"), request_timeout
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def generate(self, session: aiohttp.ClientSession, request: Request) -> Completion:
        """Sample one response. Raises EngineLostError if the server stopped answering.

        A failed attempt is repeated with growing pauses: an equal request gives an equal response.
        """
        for attempt in range(_RETRIES):
            if attempt:
                await asyncio.sleep(_BACKOFF_SECONDS * 2**attempt)
            try:
                async with session.post(
                    f"{self.url}/generate",
                    json=_payload(request),
                    headers=self.headers,
                    timeout=aiohttp.ClientTimeout(total=self.request_timeout),
                ) as response:
                    answer = await response.json()
            except aiohttp.ClientConnectorError as error:
                raise EngineLostError(f"{self.url} is gone ({error}).") from error
            except (aiohttp.ClientError, TimeoutError, ValueError):
                continue
            if response.status >= 500 or _was_aborted(answer):
                continue
            return _completion(answer, response.status, request, self.url)
        raise EngineLostError(f"{self.url}: no answer after {_RETRIES} attempts.")

    async def is_healthy(self, session: aiohttp.ClientSession, timeout: float) -> bool:
        """Whether the server answers a health check, which runs a token through the model."""
        try:
            async with session.get(
                f"{self.url}/health",
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(total=timeout),
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A control call that must succeed."""
        try:
            response = requests.post(
                f"{self.url}{path}", json=body, headers=self.headers, timeout=_CONTROL_TIMEOUT
            )
            answer = response.json() if response.content else {}
        except (requests.RequestException, ValueError) as error:
            raise EngineError(f"{self.url}{path}: no answer ({error}).") from error
        if not response.ok or answer.get("success") is False:
            raise EngineError(f"{self.url}{path}: HTTP {response.status_code}: {answer}")
        return answer

    def report(self) -> dict[str, Any]:
        """What the engine's plug-in says of itself: contract, self_check, patches, weights.

        Raises ContractError if the server carries no plug-in.
        """
        try:
            response = requests.get(
                f"{self.url}/server_info", headers=self.headers, timeout=_CONTROL_TIMEOUT
            )
            response.raise_for_status()
            info = response.json()
            report = info["internal_states"][0].get("onpolicy")
        except (requests.RequestException, ValueError, KeyError, IndexError) as error:
            raise EngineError(f"{self.url}/server_info: no answer ({error}).") from error
        if report is None:
            raise ContractError(
                f"{self.url}: its scheduler did not load the onpolicy plug-in, so it carries no "
                "contract. Start it with `onpolicy serve`; if it was, look for 'Failed to load "
                "plugin' in its log."
            )
        return report

    def flush_cache(self) -> None:
        """Drop every cached prefix; the server must be idle."""
        try:
            requests.post(
                f"{self.url}/flush_cache", headers=self.headers, timeout=_CONTROL_TIMEOUT
            ).raise_for_status()
        except requests.RequestException as error:
            raise EngineError(f"{self.url}/flush_cache failed ({error}).") from error


def _payload(request: Request) -> dict[str, Any]:
    params = request.params
    return {
        "input_ids": request.token_ids,
        "sampling_params": {
            "temperature": params.temperature,
            "max_new_tokens": params.max_new_tokens,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "sampling_seed": request.sampling_seed,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
        },
        "return_logprob": True,
        **({"return_routed_experts": True} if params.return_routed_experts else {}),
    }


def _was_aborted(answer: Any) -> bool:
    """Whether the server gave up the request, as it does when it shuts down."""
    reason = answer.get("meta_info", {}).get("finish_reason") if isinstance(answer, dict) else None
    return isinstance(reason, dict) and reason.get("type") == "abort"


def _completion(answer: Any, status: int, request: Request, url: str) -> Completion:
    if status != 200 or "output_ids" not in answer:
        raise ContractError(f"{url}/generate refused a request (HTTP {status}): {answer}")
    meta, token_ids = answer["meta_info"], answer["output_ids"]
    pairs = meta.get("output_token_logprobs") or []
    log_probs = [pair[0] for pair in pairs]
    if [pair[1] for pair in pairs] != token_ids or None in log_probs:
        raise EngineError(
            f"{url}: {len(token_ids)} tokens, but log-probabilities for {len(pairs)} of them. Training "
            "needs one for each; use SGLang from the supported range."
        )
    if not all(map(math.isfinite, log_probs)):
        bad = next(i for i, x in enumerate(log_probs) if not math.isfinite(x))
        raise EngineError(
            f"{url}: log_prob={log_probs[bad]} at response position {bad}. The weights have likely "
            "diverged; resume from an earlier checkpoint with a lower --lr."
        )
    return Completion(
        token_ids=token_ids,
        log_probs=log_probs,
        finish_reason=FinishReason(meta["finish_reason"]["type"]),
        weight_version=str(meta.get("weight_version")),
        num_cached_tokens=int(meta.get("cached_tokens") or 0),
        routed_experts=_routed_experts(meta, request, url),
    )


def _routed_experts(meta: dict[str, Any], request: Request, url: str) -> NDArray[np.int32] | None:
    """The experts of each token, if they came and are those that the response was sampled with.

    A request that was retracted is computed anew, maybe by other experts than its first tokens were
    sampled with, and SGLang returns the later ones.
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
