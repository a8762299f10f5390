"""HTTP client of remote scorers, with concurrency, retries, timeouts, and a circuit breaker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import aiohttp

from onpolicy.config.groups import RewardConfig
from onpolicy.errors import in_one_line
from onpolicy.rewards import Failure
from onpolicy.system.json_values import json_value

BACKOFF_SECONDS = 0.25
"""The first pause before a request is repeated; each later pause is twice as long."""

_LONGEST_PAUSE = 30.0


class Endpoint:
    """A client of one address, which answers JSON with JSON.

    Its circuit breaker counts requests and not time: --rm-breaker failures in a row open it, the
    rest of that call of `begin` is not sent, and the next call sends one request before all others.
    """

    def __init__(self, url: str, config: RewardConfig, api_key: str, proxy: str | None = None):
        """Take the proxy for requests (`proxy_of`); requests to a process of the run use none."""
        self.url, self.config, self._proxy = url, config, proxy
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._failures_in_a_row = 0

    @property
    def is_open(self) -> bool:
        """Whether the circuit breaker has stopped all requests."""
        return self._failures_in_a_row >= self.config.rm_breaker

    def begin(self, bodies: Sequence[Any]) -> Callable[[], list[Any]]:
        """Begin to post bodies; the result waits for the answers, in order: JSON or a Failure each."""
        found: Future[list[Any]] = Future()

        def work() -> None:
            try:
                found.set_result(asyncio.run(self._post_all(bodies)))
            except BaseException as error:  # is raised where it is waited for
                found.set_exception(error)

        threading.Thread(target=work, daemon=True, name="rewards").start()
        return found.result

    async def _post_all(self, bodies: Sequence[Any]) -> list[Any]:
        at_once = asyncio.Semaphore(self.config.rm_concurrency)
        tried: list[Any] = []
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self.config.rm_request_timeout),
            connector=aiohttp.TCPConnector(limit=0),
        ) as session:
            if self.is_open and bodies:
                tried = [await self._repeated(session, bodies[0])]

            async def post(body: Any) -> Any:
                async with at_once:
                    if self.is_open:
                        limit = f"--rm-breaker={self.config.rm_breaker}"
                        return Failure(
                            reason=f"was not sent: {self.url} failed {limit} times in a row"
                        )
                    return await self._repeated(session, body)

            return [*tried, *await asyncio.gather(*map(post, bodies[len(tried) :]))]

    async def _repeated(self, session: aiohttp.ClientSession, body: Any) -> Any:
        """Return the answer, or the last failure. Metadata is converted to JSON (`json_value`)."""
        try:
            body, answer = json_value(body), None
        except (ValueError, RecursionError) as error:
            return Failure(reason=f"cannot be sent as JSON: {in_one_line(error)}")
        for attempt in range(self.config.rm_retries + 1):
            if attempt:
                await asyncio.sleep(min(BACKOFF_SECONDS * 2 ** (attempt - 1), _LONGEST_PAUSE))
            answer, may_repeat = await self._post(session, body)
            if not may_repeat:
                break
        failed = isinstance(answer, Failure)
        self._failures_in_a_row = self._failures_in_a_row + 1 if failed else 0
        return answer

    async def _post(self, session: aiohttp.ClientSession, body: Any) -> tuple[Any, bool]:
        """Return an answer or a Failure, and whether another attempt may succeed."""
        try:
            # A session's own headers go to a proxy too, in clear, before anything is encrypted.
            async with session.post(
                self.url,
                json=body,
                headers=self._headers,
                allow_redirects=False,
                proxy=self._proxy,
            ) as response:
                if response.status == 200:
                    return await response.json(content_type=None), False
                text = in_one_line(ValueError(await response.text(errors="replace")), 200)
                may_repeat = response.status == 429 or response.status >= 500
                return self._failure(f"HTTP {response.status}: {text}"), may_repeat
        except TimeoutError:
            limit = f"--rm-request-timeout={self.config.rm_request_timeout:g} seconds"
            return self._failure(f"no answer within {limit}"), True
        except (aiohttp.ClientError, OSError) as error:
            return self._failure(f"{type(error).__name__}: {in_one_line(error)}"), True
        except ValueError as error:
            return self._failure(f"its answer is no JSON ({in_one_line(error)})"), True

    def _failure(self, what: str) -> Failure:
        return Failure(reason=f"had no answer from {self.url}: {what}")
