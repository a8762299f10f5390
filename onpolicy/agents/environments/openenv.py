"""Client of an OpenEnv server, as a class with `reset` and `step`.

The server runs anywhere, with or without a container, and its package need not be installed here:
the client uses its WebSocket, one connection per episode (openenv-core 0.3.0, its module
env_server.http_server).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from onpolicy.system.proxies import proxy_of
from onpolicy.types import Prompt

MOST_BYTES = 100 << 20
"""The most bytes of a message, as in OpenEnv's own client."""


class OpenEnv:
    """An episode at the server at `url`.

    An action becomes the field `action` of the server's action, beside the fields in `fixed`. The
    policy reads the field `observation` of an observation, or the whole as JSON if none is named.
    `reset`: the arguments of the server's reset.
    """

    def __init__(
        self,
        url: str,
        action: str,
        observation: str = "",
        fixed: Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None,
    ):
        self._url = url.rstrip("/") + "/ws"
        self._action, self._observation = action, observation
        self._fixed, self._reset = fixed or {}, reset or {}

    async def reset(self, prompt: Prompt) -> str:
        self._client = aiohttp.ClientSession()
        self._socket = await self._client.ws_connect(
            self._url, max_msg_size=MOST_BYTES, proxy=proxy_of(self._url, "--environment")
        )
        return self._text((await self._ask("reset", self._reset))["observation"])

    async def step(self, action: str) -> tuple[str, float, bool]:
        found = await self._ask("step", {**self._fixed, self._action: action})
        return self._text(found["observation"]), float(found["reward"] or 0.0), bool(found["done"])

    async def close(self) -> None:
        if client := getattr(self, "_client", None):
            if socket := getattr(self, "_socket", None):
                await socket.close()
            await client.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer. Raises RuntimeError if the server refuses it or is
        gone."""
        await self._socket.send_json({"type": kind, "data": {**data}})
        message = await self._socket.receive()
        if message.type != aiohttp.WSMsgType.TEXT:
            raise RuntimeError(f"{self._url}: {kind}: the server ended the connection")
        answer = message.json()
        found: dict[str, Any] = answer.get("data", {})
        if answer.get("type") == "error":
            raise RuntimeError(f"{self._url}: {kind} {dict(data)!r} is refused: {found}")
        return {"observation": {}, "reward": None, "done": False, **found}

    def _text(self, observation: Mapping[str, Any]) -> str:
        if not self._observation:
            return json.dumps(observation)
        if self._observation not in observation:
            raise ValueError(
                f"observation={self._observation!r}: {self._url} observes "
                f"{', '.join(sorted(observation))}. Name one of them in --environment-args."
            )
        found = observation[self._observation]
        return found if isinstance(found, str) else json.dumps(found)
