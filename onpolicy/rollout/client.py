"""Client of one SGLang server: requests, weights, status. It knows HTTP and nothing of processes.

Requests that start within a moment share one HTTP call (`Burst`), since a call of its own costs both
ends more than an answer of a few tokens does; each is answered as soon as the server is done with it
(`sglang_patches/generate_each.py`). `completion_of` reads the completion in an answer, and raises an
error for an answer that is wrong.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import aiohttp
import numpy as np
import requests
from numpy.typing import NDArray

from onpolicy.errors import ContractError, EngineError
from onpolicy.images.placed import write_images
from onpolicy.system.number_arrays import Floats, Ints
from onpolicy.system.proxies import ask
from onpolicy.trajectory import UNPUSHED, Completion, FinishReason, Span
from onpolicy.types import Request

Kind = TypeVar("Kind", Ints, Floats)

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
        """Have the server, if it answers, end all that it is sampling with the tokens it has."""
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
        """Return whether the server passes a health check. Raises EngineLostError if it is gone."""
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
        """Return the plug-in's report, and whether the server has a tokenizer ("serves_text").

        Raises ContractError if it has no plug-in.
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
        """Send a request. Raises EngineLostError without an answer in time."""
        seconds = self.patience(num_bytes)
        headers = self.headers if method == "GET" else self.admin_headers
        try:
            return ask(method, f"{self.url}{path}", headers=headers, timeout=seconds, **body)
        except requests.RequestException as error:
            raise EngineLostError(
                f"{self.url}{path}: no answer ({error}). Is the server running? One that only takes "
                f"longer than {seconds:.0f} s needs a higher --rollout-health-timeout."
            ) from error


class EngineLostError(EngineError):
    """Error of a server that no longer answers; its owner decides whether to restart it."""


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
    params, grammar = request.params, request.params.grammar
    return {
        "input_ids": base64.b64encode(Ints(request.prompt_ids).array.tobytes()).decode(),
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
            **({grammar.kind: grammar.text} if grammar else {}),
            "custom_params": _own_params(request),
        },
        **({"return_routed_experts": True} if params.return_routed_experts else {}),
        **({"top_logprobs_num": params.num_likeliest} if params.num_likeliest else {}),
    }


def _own_params(request: Request) -> dict[str, Any] | None:
    """Return the parameters that only an engine under a contract understands."""
    params: dict[str, Any] = {}
    if request.params.grammar:
        params["num_begun"] = request.num_begun
    if request.images:
        params["images"] = write_images(request.images)
    return params or None


PATH = "/generate_each"

MOMENT = 0.001
"""Seconds without another request after which the call is made."""

MOST_MOMENTS = 20
"""The most such moments that a call waits."""

MOST_TOKENS = 1 << 16
"""The most prompt tokens in a call before the last request: a server parses all of them first."""

Answer = tuple[int, Any]
"""The HTTP status, and the decoded body."""


class Burst:
    """A call that is about to be made, or under way."""

    def __init__(
        self, send: Callable[[list[dict[str, Any]]], Any], leave: Callable[[Burst], object]
    ):
        """Take `send`, which makes the call and returns an asynchronous context of its response,
        and `leave`, which is called with this burst when no request may join any more."""
        self._send, self._leave = send, leave
        self._asked: list[dict[str, Any]] = []
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        """The answers that are not there yet: others would be held until the last is."""
        self._num_tokens = 0
        self._task: asyncio.Task[None] | None = None

    async def ask(self, payload: dict[str, Any]) -> Answer:
        """Send this request with the others and return its answer. Raises the error of the call."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[len(self._asked)] = answer
        self._asked.append(payload)
        self._num_tokens += len(payload["input_ids"]) * 3 // 4 // 4
        if self._num_tokens >= MOST_TOKENS:
            self._leave(self)
        self._task = self._task or asyncio.create_task(self._work())
        try:
            return await answer
        finally:
            if self._answers and all(each.cancelled() for each in self._answers.values()):
                self._task.cancel()

    async def _work(self) -> None:
        failure: Exception = aiohttp.ClientPayloadError("the answer ended before all were answered")
        try:
            await self._gather()
            async with self._send(self._asked) as response:
                await self._hear(response)
        except Exception as error:
            failure = error
        finally:
            self._leave(self)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(failure)

    async def _gather(self) -> None:
        """Wait until no more requests join."""
        count = 0
        for _ in range(MOST_MOMENTS):
            if count == len(self._asked) or self._num_tokens >= MOST_TOKENS:
                break
            count = len(self._asked)
            await asyncio.sleep(MOMENT)
        self._leave(self)

    async def _hear(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            told = await response.json()
            for place in range(len(self._asked)):
                self._tell(place, response.status, told)
            return
        async for line in _lines(response.content):
            for answer in json.loads(line):
                self._tell(*answer)

    def _tell(self, place: int, status: int, told: Any) -> None:
        answer = self._answers.pop(place, None)
        if answer is None:
            raise ValueError(f"request {place} of a call has two answers, or was not asked")
        if not answer.done():  # whoever asked may have given up
            answer.set_result((status, told))


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a body, however long they are."""
    parts: list[bytes] = []
    async for chunk in content.iter_any():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join((*parts, end))
            parts = []
        parts.append(rest)


def completion_of(answer: Any, status: int, request: Request, url: str) -> Completion:
    """Return the completion in an answer. Raises ContractError or EngineError if it has none."""
    if status == 404:
        raise ContractError(
            f"{url}: HTTP 404 for a run's requests: the server has the plug-in of another version. "
            "Start it by `onpolicy serve`, of the same version as the run."
        )
    if status != 200 or "output_ids" not in answer:
        raise ContractError(f"{url}/generate refused a request (HTTP {status}): {answer}")
    meta, response_ids = answer["meta_info"], _numbers(answer["output_ids"], Ints)
    values, tokens = meta["output_token_logprobs"]
    log_probs = _numbers(values, Floats)
    if tokens != answer["output_ids"] or len(log_probs) != len(response_ids):
        raise EngineError(
            f"{url}: {len(response_ids)} tokens, but log-probabilities for {len(log_probs)} of them. "
            "Training needs one for each; use SGLang from the supported range."
        )
    if not (is_finite := np.isfinite(log_probs.array)).all():
        bad = int(is_finite.argmin())
        raise EngineError(
            f"{url}: log_prob={log_probs[bad]} at response position {bad}. The weights have likely "
            "diverged; resume from an earlier checkpoint with a lower --lr. In --dtype float16 a number "
            "above 65,504 is infinite too; bfloat16 holds it."
        )
    completion = Completion(
        response_ids=response_ids,
        rollout_log_probs=log_probs,
        finish_reason=FinishReason(meta["finish_reason"]["type"]),
        weight_version=_version(meta.get("weight_version")),
        num_cached_tokens=int(meta.get("cached_tokens") or 0),
        routed_experts=_routed_experts(meta, request, url) if response_ids else None,
        kept_tokens=_kept_tokens(meta, request, len(response_ids), url),
        row_digests=_row_digests(meta, len(response_ids), url),
        likeliest=_likeliest(meta, request.params.num_likeliest, response_ids, log_probs, url),
        spans=tuple(
            Span(version=_version(span["version"]), start=int(span["start"]), end=int(span["end"]))
            for span in meta.get("weight_versions") or ()
        ),
    )
    if not was_aborted(answer):
        return completion
    # An abort does not say whether the last token ends the response, so drop that token.
    return completion.until(max(len(response_ids) - 1, 0), completion.finish_reason)


def was_aborted(answer: Any) -> bool:
    """Return whether the server gave up the request, as it does when it shuts down."""
    reason = answer.get("meta_info", {}).get("finish_reason") if isinstance(answer, dict) else None
    return isinstance(reason, dict) and reason.get("type") == "abort"


def _numbers(encoded: str, kind: type[Kind]) -> Kind:
    """Decode numbers that `sglang_patches/generate_each.py` put into base64."""
    return kind(np.frombuffer(base64.b64decode(encoded), kind.dtype))


def _kept_tokens(meta: dict[str, Any], request: Request, count: int, url: str) -> list[bytes]:
    """Return the set that each of `count` tokens was drawn from, as our sampler reports."""
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


def _row_digests(meta: dict[str, Any], count: int, url: str) -> list[int]:
    """Return the digest of each of `count` tokens' rows; none from an engine that gives none."""
    digests = meta.get("row_digests", [])
    if digests and [type(each) for each in digests] != [int] * count:
        raise EngineError(
            f"{url}: {count} tokens, and digests of {len(digests)} rows of log-probabilities. Each "
            "token has one, an integer; use SGLang from the supported range."
        )
    return [*digests]


def _likeliest(
    meta: dict[str, Any], k: int, response_ids: Ints, log_probs: Floats, url: str
) -> list[bytes]:
    """Return the k likeliest tokens at each token (`ops/likeliest_tokens.py`). The sampled token must
    be among them with its own log-probability, or be no likelier than all of them."""
    count = len(response_ids)
    if not (k and count):
        return []
    encoded = meta.get("output_top_logprobs") or ("", "")
    values, ids = (
        np.frombuffer(base64.b64decode(text), dtype)
        for text, dtype in zip(encoded, ("<f4", "<i4"), strict=True)
    )
    if not len(values) == len(ids) == count * k:
        raise EngineError(
            f"{url}: {count} tokens, and {len(values)} log-probabilities of the likeliest ones. "
            f"--opd-top-k asks for {k} with each; use SGLang from the supported range."
        )
    values, ids = values.reshape(count, k), ids.reshape(count, k)
    own, is_own = log_probs.array[:, None], ids == response_ids.array[:, None]
    is_sound = np.where(is_own, values == own, is_own.any(-1, keepdims=True) | (values >= own))
    if np.isnan(values).any() or not is_sound.all():
        bad = int(is_sound.all(-1).argmin())
        raise EngineError(
            f"{url}: response position {bad}: the sampled token's log-probability {log_probs[bad]} does "
            f"not fit those of the {k} likeliest tokens, from {values[bad][0]} to {values[bad][-1]}. "
            "Use SGLang from the supported range."
        )
    return [a.tobytes() + b.tobytes() for a, b in zip(ids, values, strict=True)]


def _version(said: object) -> int:
    """Return the number of a push; SGLang keeps a text, `default` for its own weights."""
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
