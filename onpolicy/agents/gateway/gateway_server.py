"""Gateway: an HTTP server in the episode loop, in which every session has a base URL and a key."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from onpolicy.agents.gateway.calls import Call
from onpolicy.agents.gateway.fields import ALWAYS_SENT, Fields
from onpolicy.agents.gateway.known import Asked
from onpolicy.agents.gateway.protocols import (
    WireProtocol,
    anthropic_messages,
    chat_completions,
    completions,
    responses,
)
from onpolicy.agents.gateway.refusals import RefusedError, session_is_over
from onpolicy.agents.gateway.session import Session, SessionRules
from onpolicy.rollout.rollouter import Turns
from onpolicy.system.files import parse_json

logger = logging.getLogger(__name__)

PROTOCOLS: tuple[WireProtocol, ...] = (chat_completions, completions, responses, anthropic_messages)
MOST_BYTES = 64 << 20
"""The most bytes of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """A session, and the address that its client needs."""

    session: Session
    name: str

    base_url: str
    """The base URL for OpenAI's clients; Anthropic's add `/v1` themselves."""

    api_key: str
    """The key, valid for this session alone, while it lasts."""


class Gateway:
    """A server of sessions on `host`, at a free port, in one event loop."""

    def __init__(self, rules: SessionRules, host: str = "127.0.0.1"):
        self.rules, self._host = rules, host
        self.routes: list[web.RouteDef] = []
        """Further routes, to be added before the first session."""

        self.url = ""
        """The address where it listens, once it has started."""

        self._sessions: dict[str, OpenSession] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._told = set[str]()

    @property
    def num_sessions(self) -> int:
        """Return the number of open sessions."""
        return len(self._sessions)

    async def start(self) -> None:
        """Listen, unless it already does. Raises OSError where it cannot."""
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=MOST_BYTES, middlewares=[_unserved])
            app.router.add_routes(self.routes)
            for protocol in PROTOCOLS:
                path = f"/sessions/{{name}}/v1{protocol.PATH}"
                app.router.add_post(path, partial(self._answer, protocol))
            counted = f"/sessions/{{name}}/v1{anthropic_messages.PATH}/count_tokens"
            app.router.add_post(counted, self._count)
            app.router.add_get("/sessions/{name}/v1/models", self._models)
            app.router.add_get("/sessions/{name}/v1/models/{model}", self._models)
            # A client that disconnects cancels its handler.
            runner = web.AppRunner(
                app, handler_cancellation=True, access_log=None, shutdown_timeout=1
            )
            await runner.setup()
            site = web.TCPSite(runner, self._host, 0)
            await site.start()
            host = f"[{self._host}]" if ":" in self._host else self._host
            self.url = f"http://{host}:{runner.addresses[0][1]}"
            self._runner = runner

    async def close(self) -> None:
        """End all sessions, and stop listening."""
        for opened in list(self._sessions.values()):
            await self.end(opened)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def open(self, turns: Turns) -> OpenSession:
        """Return a new session in which clients act on branches of `turns`."""
        await self.start()
        name = secrets.token_hex(8)
        opened = OpenSession(
            session=Session(self.rules, turns),
            name=name,
            base_url=f"{self.url}/sessions/{name}/v1",
            api_key=secrets.token_urlsafe(32),
        )
        self._sessions[name] = opened
        return opened

    async def end(self, opened: OpenSession) -> list[Turns]:
        """End a session and invalidate its key; return the branches to learn from."""
        self._sessions.pop(opened.name, None)
        return await opened.session.close()

    async def _answer(self, protocol: WireProtocol, request: web.Request) -> web.StreamResponse:
        session: Session | None = None
        try:
            session = self._session(request)
            fields = await _fields(request, session)
            call = protocol.read(fields)
            self._tell_of_run(fields)
            asked = await session.ask(call)
        except RefusedError as refused:
            if session is not None:
                session.num_refused += 1
            return web.json_response(protocol.error(refused), status=refused.status)
        except Exception as error:
            logger.exception("a client of the gateway could not be answered")
            failed = RefusedError(500, f"{type(error).__name__}: {error}", code="server_error")
            return web.json_response(protocol.error(failed), status=500)
        try:
            return await _send(protocol, call, asked, request)
        except BaseException:
            session.give_up(asked)
            raise

    def _tell_of_run(self, fields: Fields) -> None:
        """Log, once for each field, that the run's value is used in place of a client's."""
        for asked, why in fields.of_run.items():
            if (field := asked.partition("=")[0]) not in self._told:
                self._told.add(field)
                logger.warning(
                    "a client of the gateway asks for %s; %s. The run's own %s is taken, here and in "
                    "all further requests",
                    asked, why, field,
                )  # fmt: skip

    async def _count(self, request: web.Request) -> web.StreamResponse:
        """Answer the number of tokens of a request's messages, as Anthropic's clients ask it."""
        try:
            session = self._session(request)
            call = anthropic_messages.read_counted(await _fields(request, session))
            return web.json_response({"input_tokens": session.count(call)})
        except RefusedError as refused:
            return web.json_response(refused.as_anthropic(), status=refused.status)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._session(request)
            model = {"id": self.rules.model_name, "object": "model", "created": 0}
            model = {**model, "owned_by": "onpolicy"}
            if (name := request.match_info.get("model")) is None:
                return web.json_response({"object": "list", "data": [model]})
            if name != self.rules.model_name:
                raise RefusedError(
                    404, f"The model {name!r} does not exist.", code="model_not_found"
                )
        except RefusedError as refused:
            return web.json_response(refused.as_openai(), status=refused.status)
        return web.json_response(model)

    def _session(self, request: web.Request) -> Session:
        """Return the session of a request. Refuses a key that does not open it."""
        opened = self._sessions.get(request.match_info["name"])
        if opened is None or not has_key(request, opened.api_key):
            raise session_is_over()
        return opened.session


def has_key(request: web.Request, *api_keys: str) -> bool:
    """Return whether a client gave one of these keys, in OpenAI's or Anthropic's way."""
    headers = request.headers
    given = headers.get("x-api-key") or headers.get("Authorization") or ""
    key = given.removeprefix("Bearer ").strip()
    # aiohttp reads bytes that are no UTF-8 as lone surrogates, which nothing encodes but this.
    sent = key.encode(errors="surrogateescape")
    return any(secrets.compare_digest(sent, each.encode()) for each in api_keys)


@web.middleware
async def _unserved(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer requests for unknown paths in JSON, as the clients of either family read it."""
    try:
        answer: web.StreamResponse = await handler(request)
        return answer
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.method} is not served at {request.path}: {allowed} is."
        refused, headers = RefusedError(405, message, code="method_not_allowed"), {"Allow": allowed}
    except web.HTTPNotFound:
        served = ", ".join([*(protocol.PATH for protocol in PROTOCOLS), "/models"])
        message = (
            f"Nothing is served at {request.path}. A session has, after its base URL, {served}."
        )
        refused, headers = RefusedError(404, message, code="not_found"), {}
    is_theirs = "anthropic-version" in request.headers
    body = refused.as_anthropic() if is_theirs else refused.as_openai()
    return web.json_response(body, status=refused.status, headers=headers)


async def _fields(request: web.Request, session: Session) -> Fields:
    """Return the fields of a request that are its protocol's."""
    fields = Fields(await _body(request))
    fields.ignore(*ALWAYS_SENT)
    fields.refuse_other_sampling(session.turns.request.params)
    return fields


async def _body(request: web.Request) -> Any:
    try:
        body = parse_json((await request.read()).decode())
        json.dumps(body, ensure_ascii=False).encode()  # no tokenizer takes half of a surrogate pair
    except web.HTTPRequestEntityTooLarge as error:
        raise RefusedError(413, f"The body has more than {MOST_BYTES} bytes.") from error
    except ValueError as error:
        message = f"The body is not valid JSON: {error}"
        raise RefusedError(400, message, code="invalid_json") from error
    return body


async def _send(
    protocol: WireProtocol, call: Call, asked: Sequence[Asked], request: web.Request
) -> web.StreamResponse:
    """Write the whole answers, so that it is known whether a client received them."""
    replies = [each.sampling.result().reply for each in asked]
    if not call.streams:
        whole = web.json_response(protocol.answer(call, replies))
        await whole.prepare(request)
        await whole.write_eof()
        return whole
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    stream = web.StreamResponse(headers=headers)
    await stream.prepare(request)
    for event, data in protocol.events(call, replies):
        line = f"event: {event}\n" if event else ""
        text = data if isinstance(data, str) else json.dumps(data)
        await stream.write(f"{line}data: {text}\n\n".encode())
    await stream.write_eof()
    return stream
