"""Authorisation: the calls that a server answers, and the key for each. In every contract.

SGLang has two keys and gives each its own calls, so that a run would need both; `/server_info`
shows both to a client; and any control call with the right key is answered. Here the key of runs is
valid for every call that is answered at all and the key of clients for samples alone. Control calls
that no run makes are refused with any key: one of them writes requests into any directory that it
names.

Public reports: sgl-project/sglang #30166 and #37457 (keys in /server_info),
vllm-project/vllm #58144 (a second address of a call, for which no key is asked).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any

from sglang_patches import registry

MIDDLEWARE = "sglang.srt.utils.auth.add_api_key_middleware"
SERVER_INFO = "sglang.srt.sampling.watermarking.core.redact_watermark_secrets"

OPEN = frozenset({"/health", "/health_generate", "/ready", "/metrics", "/metrics/"})
"""Calls that need no key, as monitoring expects."""

OF_RUNS = frozenset({
    "/abort_request", "/flush_cache", "/update_weight_version",
    "/begin_weight_update", "/end_weight_update",
    "/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_disk",
    "/init_weights_update_group", "/destroy_weights_update_group",
    "/load_lora_adapter_from_tensors", "/unload_lora_adapter",
    "/release_memory_occupation", "/resume_memory_occupation",
    "/freeze_gc",  # the server's own, once it has started
})  # fmt: skip
"""Control calls that a run makes."""

OF_CLIENTS = frozenset({
    "/", "/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc", "/ping",
    "/generate", "/generate_each", "/encode", "/classify", "/tokenize", "/detokenize",
    "/model_info", "/get_model_info", "/server_info", "/get_server_info",
    "/parse_function_call", "/separate_reasoning", "/get_hicache_l3_cache_layout",
    "/v1/audio/transcriptions", "/v1/chat/completions", "/v1/classify", "/v1/completions",
    "/v1/decisions", "/v1/detokenize", "/v1/embeddings", "/v1/loads", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/models", "/v1/realtime", "/v1/rerank", "/v1/responses",
    "/v1/score", "/v1/systemone", "/v1/tokenize",
    "/api/chat", "/api/generate", "/api/show", "/api/tags", "/invocations", "/vertex_generate",
})  # fmt: skip
"""Calls that sample, count or report, and change nothing. SGLang's own classification is not used:
it includes /open_session, and recognises no route of an included router as a control call."""

BELOW_CLIENTS = ("/v1/models/", "/v1/responses/")
"""Prefixes of paths that end with a name."""

UNAUTHORIZED, FORBIDDEN = 401, 403

_NAMES_OF_SECRETS = ("api_key", "password", "secret", "token")


def install() -> None:
    registry.hook(MIDDLEWARE, add_guard, "replace")
    registry.hook(SERVER_INFO, _without_secrets, "after")


def add_guard(app: Any, *, api_key: str | None, admin_api_key: str | None) -> None:
    """Have every request to `app` pass `refusal`. A single key is valid for both kinds of calls."""
    app.add_middleware(
        _Guard,
        routes=lambda: app.router.routes,
        key_of_runs=admin_api_key or api_key or "",
        key_of_clients=api_key or "",
    )


class _Guard:
    """ASGI middleware that answers refused requests, and passes on the rest."""

    def __init__(
        self,
        app: Any,
        *,
        routes: Callable[[], Iterable[Any]],
        key_of_runs: str,
        key_of_clients: str,
    ):
        self._app, self._routes = app, routes
        self._keys = key_of_runs, key_of_clients

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or (refused := self._refusal(scope)) is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(*refused)(scope, receive, send)

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            return None  # a browser asks so before it asks with a key
        path = _path(scope)
        return refusal(path, self._is_known(scope), _key(scope), *self._keys)

    def _is_known(self, scope: Any) -> bool:
        """Return whether SGLang has a route for the path, with any method."""
        from starlette.routing import Match

        return any(route.matches(scope)[0] != Match.NONE for route in self._routes())


def _answer(status: int, message: str) -> Any:
    """Return the response to a refused call, in OpenAI's form."""
    from starlette.responses import JSONResponse

    kind = "authentication_error" if status == UNAUTHORIZED else "permission_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


def refusal(
    path: str, is_known: bool, key: str, key_of_runs: str, key_of_clients: str
) -> tuple[int, str] | None:
    """Return (HTTP status, message) for a refused call, None for one that is passed on.

    `is_known`: whether SGLang has a route for it; without one SGLang answers 404.
    """
    if path in OPEN:
        return None
    is_of_clients = path in OF_CLIENTS or path.startswith(BELOW_CLIENTS) or not is_known
    if not is_of_clients and path not in OF_RUNS:
        return FORBIDDEN, (
            f"{path}: this server answers calls for samples, and the control calls that a run makes; "
            "this is neither, and it would change the server for all who use it. To debug a server, "
            "start SGLang without onpolicy."
        )
    if not key_of_runs or _same(key, key_of_runs):
        return None
    if not _same(key, key_of_clients):
        given = "a key that is not this server's" if key else "no key"
        return UNAUTHORIZED, (
            f"{path}: was asked with {given}. Send one that `onpolicy serve` wrote into its run "
            "directory, as the header 'Authorization: Bearer KEY'."
        )
    if is_of_clients:
        return None
    return FORBIDDEN, (
        f"{path}: the key is that of clients, who may ask for samples, and this call changes the "
        "server for all. Give the key of runs, which `onpolicy serve` writes into its api_key file."
    )


def _same(given: str, key: str) -> bool:
    """Compare keys in constant time."""
    return bool(key) and secrets.compare_digest(given.encode(), key.encode())


def _key(scope: Any) -> str:
    """Return the key in a request's headers as OpenAI's or Anthropic's clients send it, or nothing."""
    headers: dict[bytes, str] = {
        name.lower(): value.decode("latin-1") for name, value in scope["headers"]
    }
    kind, _, key = headers.get(b"authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get(b"x-api-key", "")


def _path(scope: Any) -> str:
    """Return a call's path from its request line: Starlette's URL depends on `Host`."""
    root, path = scope.get("root_path", "").rstrip("/"), str(scope["path"])
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _without_secrets(told: Any, *_: Any, **__: Any) -> Any:
    """Return the data of /server_info without the values of keys and without the launch command,
    which contains them and which each scheduler reports too."""
    if isinstance(told, list):
        return [_without_secrets(each) for each in told]
    if not isinstance(told, dict):
        return told
    return {name: _shown(str(name), value) for name, value in told.items()}


def _shown(name: str, value: Any) -> Any:
    if name == "launch_command":
        return None
    is_secret = name.endswith(_NAMES_OF_SECRETS) and isinstance(value, str)
    return "..." if value and is_secret else _without_secrets(value)
