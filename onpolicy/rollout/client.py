"""Client of one SGLang server: requests, weights, status. It knows HTTP and nothing of processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import aiohttp
import requests

from onpolicy.errors import ContractError, EngineError
from onpolicy.rollout.answers import completion_of, was_aborted
from onpolicy.rollout.bursts import PATH, Burst
from onpolicy.rollout.direct_http import ask
from onpolicy.trajectory import Completion
from onpolicy.types import Request


class EngineLostError(EngineError):
    """The server no longer answers; its owner decides whether to restart it."""


_RETRIES = 4
_BACKOFF_SECONDS = 0.25
_IDLE_SECONDS = 5
_ABORT_PAUSE = 0.02

_BYTES_PER_SECOND = 100 << 20
"""The slowest rate at which an engine may load weights, from a disk for example."""


class EngineClient:
    """A client of the server at one URL."""

    def __init__(
        self,
        url: str,
        api_key: str,
        request_timeout: float,
        health_timeout: float,
        admin_api_key: str = "",
    ):
        self.url, self.request_timeout = url.rstrip("/"), request_timeout
        self.health_timeout = health_timeout
        self.headers = _authorization(api_key)
        self.admin_headers = _authorization(admin_api_key or api_key)
        self._bursts: dict[aiohttp.ClientSession, Burst] = {}

    async def generate(
        self, session: aiohttp.ClientSession, request: Request, takes_parts: bool = False
    ) -> Completion:
        """Sample one response. Raises EngineLostError if the server stopped answering.

        A failed attempt is repeated with growing pauses: an equal request gives an equal response.
        `takes_parts`: return a response that the server gave up as it is.
        """
        for attempt in range(_RETRIES):
            if attempt:
                await asyncio.sleep(_BACKOFF_SECONDS * 2**attempt)
            try:
                status, answer = await self._burst(session).ask(_payload(request))
            except aiohttp.ClientConnectorError as error:
                raise EngineLostError(f"{self.url} is gone ({error}).") from error
            except (aiohttp.ClientError, TimeoutError, ValueError):
                continue
            if status >= 500 or (was_aborted(answer) and not takes_parts):
                continue
            return completion_of(answer, status, request, self.url)
        raise EngineLostError(f"{self.url}: no answer after {_RETRIES} attempts.")

    def _burst(self, session: aiohttp.ClientSession) -> Burst:
        """Return the call that collects the requests of this moment."""
        if session not in self._bursts:
            self._bursts[session] = Burst(
                lambda requests: session.post(
                    f"{self.url}{PATH}",
                    json={"requests": requests},
                    headers=self.headers,
                    timeout=aiohttp.ClientTimeout(total=self.request_timeout),
                ),
                lambda burst: self._leave(session, burst),
            )
        return self._bursts[session]

    def _leave(self, session: aiohttp.ClientSession, burst: Burst) -> None:
        if self._bursts.get(session) is burst:
            del self._bursts[session]

    async def abort(self, session: aiohttp.ClientSession) -> None:
        """Have the server answer everything that it is sampling, with the tokens it has.

        Ignores a server that does not answer: whoever waits for a response notices.
        """
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.post(
                f"{self.url}/abort_request",
                json={"rid": "", "abort_all": True},
                headers=self.admin_headers,
                timeout=aiohttp.ClientTimeout(total=self.health_timeout / 3),
            ):
                pass

    async def abort_when(
        self, is_interrupted: Callable[[], bool], session: aiohttp.ClientSession
    ) -> None:
        """Abort repeatedly once `is_interrupted()` holds: further requests may be on their way."""
        while True:
            if is_interrupted():
                await self.abort(session)
            await asyncio.sleep(_ABORT_PAUSE)

    async def is_healthy(self, session: aiohttp.ClientSession) -> bool:
        """Return whether the server passes a health check, which runs a token through the model.

        Raises EngineLostError if nothing listens there.
        """
        try:
            async with session.get(
                f"{self.url}/health",
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(total=self.health_timeout / 3),
            ) as response:
                return response.status == 200
        except aiohttp.ClientConnectorError as error:
            raise EngineLostError(f"{self.url} is gone ({error}).") from error
        except (aiohttp.ClientError, TimeoutError):
            return False

    def patience(self, num_bytes: int) -> float:
        """Return the timeout in seconds of a control call that moves so many bytes of weights."""
        return self.health_timeout + num_bytes / _BYTES_PER_SECOND

    def post(self, path: str, body: dict[str, Any], num_bytes: int = 0) -> dict[str, Any]:
        """Make a control call that must succeed; raise EngineError if it does not."""
        response = self._call("POST", path, num_bytes, json=body)
        answer = _json(response)
        if not response.ok or answer.get("success") is False:
            raise EngineError(f"{self.url}{path}: HTTP {response.status_code}: {answer}")
        return answer

    def report(self) -> dict[str, Any]:
        """Return the plug-in's report: contract, self_check, patches, weights; and "serves_text".

        "serves_text" says whether the server has a tokenizer. Raises ContractError if it has no
        plug-in.
        """
        response = self._call("GET", "/server_info")
        answer = _json(response)
        if not answer.get("internal_states"):
            raise EngineError(f"{self.url}/server_info: HTTP {response.status_code}: {answer}")
        report: dict[str, Any] | None = answer["internal_states"][0].get("onpolicy")
        if report is None:
            raise ContractError(
                f"{self.url}: its scheduler did not load the onpolicy plug-in, so it carries no "
                "contract. Start it with `onpolicy serve`; if it was, look for 'Failed to load "
                "plugin' in its log."
            )
        serves_text = not answer.get("skip_tokenizer_init")
        return {"weights": None, **report, "serves_text": serves_text}

    def flush_cache(self) -> None:
        """Drop every cached prefix as soon as the server is idle: a health check may be under way."""
        response = self._call("POST", f"/flush_cache?timeout={_IDLE_SECONDS}")
        if not response.ok:
            raise EngineError(
                f"{self.url}/flush_cache: HTTP {response.status_code}: {_json(response)}"
            )

    def _call(self, method: str, path: str, num_bytes: int = 0, **body: Any) -> requests.Response:
        """Send a request. Raises EngineLostError without an answer in time; a dead server fails
        sooner."""
        seconds = self.patience(num_bytes)
        headers = self.headers if method == "GET" else self.admin_headers
        try:
            return ask(method, f"{self.url}{path}", headers=headers, timeout=seconds, **body)
        except requests.RequestException as error:
            raise EngineLostError(
                f"{self.url}{path}: no answer ({error}). Is the server running? One that only takes "
                f"longer than {seconds:.0f} s needs a higher --rollout-health-timeout."
            ) from error


def _authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _json(response: requests.Response) -> dict[str, Any]:
    """Return the JSON object in a response; anything else as {"text": its beginning}."""
    try:
        answer = response.json()
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"text": response.text[:500]}


def _payload(request: Request) -> dict[str, Any]:
    params = request.params
    return {
        "input_ids": request.prompt_ids,
        "sampling_params": {
            "temperature": params.temperature,
            "max_new_tokens": params.max_new_tokens,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "sampling_seed": request.sampling_seed,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            **({"stop": [*params.stop], "no_stop_trim": True} if params.stop else {}),
            **_grammar(request),
            "custom_params": _custom(request),
        },
        **({"return_routed_experts": True} if params.return_routed_experts else {}),
    }


def _grammar(request: Request) -> dict[str, Any]:
    if (grammar := request.params.grammar) is None:
        return {}
    return {grammar.kind: grammar.text}


def _custom(request: Request) -> dict[str, Any] | None:
    """Return the fields that only an engine under a contract understands (`sglang_patches/`)."""
    begun = {} if request.params.grammar is None else {"num_begun": request.num_begun}
    return {**begun, **({"entropy": True} if request.params.return_entropy else {})} or None
